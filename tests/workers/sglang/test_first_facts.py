"""What servers were at first: told to Redis again while further servers are connected."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from test_client_facts import facts_of

from workers.broker.keys import FIRST_FACTS
from workers.lane.first_facts import FirstFacts


class Interrupted(redis.Redis):
    """A Redis in the middle of whose answer another thread does something, once."""

    meanwhile: Callable[[], object] | None = None

    def hsetnx(self, *args: Any, **options: Any) -> Any:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().hsetnx(*args, **options)


@pytest.fixture
def client(redis_url: str) -> Iterator[Interrupted]:
    with Interrupted.from_url(redis_url) as client:
        yield client


def test_a_server_that_is_connected_while_redis_is_told_costs_no_look(client: Interrupted) -> None:
    known = FirstFacts(client)
    known.check("run", "http://one", facts_of("final"))
    known.check("run", "http://two", facts_of("final"))
    client.delete(FIRST_FACTS)
    client.meanwhile = lambda: known.check("run", "http://three", facts_of("final"))
    known.tell()
    known.tell()
    assert set(client.hkeys(FIRST_FACTS)) == {b"run http://one", b"run http://two", b"run http://three"}
