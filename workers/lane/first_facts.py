"""What each server was when the run began with it, in Redis, so that a change is noticed by all lanes.

Also by one that starts after the change. `enqueue` writes what the servers are then, which is how a
person agrees to a change. What counts as one is in `workers/sglang/unchanged.py`.
"""

import json
from collections.abc import Mapping

from redis import Redis, RedisError

from workers.broker.keys import FIRST_FACTS
from workers.sglang.facts import ServerFacts
from workers.sglang.unchanged import check_unchanged


class FirstFacts:
    """What one lane process knows of them; a Redis that lost its data is told again."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._known: dict[str, str] = {}
        """Field of the hash → its value."""

    def check(self, run_id: str, url: str, facts: ServerFacts) -> None:
        """Raises `UnsuitableError` when the server is not what the run began with; the first to ask
        decides what that was. With Redis away, what this process knows counts.
        """
        field = f"{run_id} {url}"
        try:
            self._known[field] = self._first(field, json.dumps(facts.to_json()))
        except (RedisError, OSError):
            self._known.setdefault(field, json.dumps(facts.to_json()))
        check_unchanged(ServerFacts.from_json(json.loads(self._known[field])), facts, url)

    def tell(self) -> None:
        """Write what a Redis without its data lacks. Raises `RedisError`."""
        for field, value in tuple(self._known.items()):  # a server may be connected meanwhile
            self._redis.hsetnx(FIRST_FACTS, field, value)

    def _first(self, field: str, value: str) -> str:
        if field in self._known:
            self._redis.hsetnx(FIRST_FACTS, field, self._known[field])
        else:
            self._redis.hsetnx(FIRST_FACTS, field, value)
        held = self._redis.hget(FIRST_FACTS, field)
        return value if held is None else str(held, "utf-8") if isinstance(held, bytes) else held


def agree(redis: Redis, run_id: str, servers: Mapping[str, ServerFacts]) -> None:
    """From now on the run goes on with these servers as they are."""
    for url, facts in servers.items():
        redis.hset(FIRST_FACTS, f"{run_id} {url}", json.dumps(facts.to_json()))


def first_of(redis: Redis, run_id: str, url: str) -> ServerFacts | None:
    """What the run began with at this address; None when it has not used it."""
    held = redis.hget(FIRST_FACTS, f"{run_id} {url}")
    return None if held is None else ServerFacts.from_json(json.loads(held))
