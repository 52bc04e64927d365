"""Redis stopped while a sink holds results: the same process goes on, and says so in a few lines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import storage
from tests.own_redis import OwnRedis
from tests.workers.sink.machine import Machine, wait_until
from tests.workers.sink.making import make_prompts, make_response, make_states, make_store
from workers.broker.keys import UNACKED
from workers.broker.messages import Responded
from workers.broker.publish import publish_many
from workers.runs import claim


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    own = OwnRedis(tmp_path / "redis")
    yield own
    own.stop()


@pytest.fixture
def machine(own_redis: OwnRedis, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(own_redis.url, tmp_path)
    yield machine
    machine.end()


def test_a_sink_that_holds_results_as_redis_goes_away_lives_and_stores_them(
    machine: Machine, own_redis: OwnRedis
) -> None:
    store = make_store(machine.folder / "out", {"B1": 10})
    claim(machine.client, store.run, store.path)
    sink = machine.sink()
    wait_until(lambda: (seen := machine.snapshot()) is not None and seen.state == "running")
    results = []
    for prompt in make_prompts("B1", 10):
        response = make_response(prompt)
        states = make_states(machine.spool, response)
        results.append(Responded(run=store.run.id, response=response, states=states))
    publish_many(machine.app, results)
    wait_until(lambda: machine.client.hlen(UNACKED) == 10)
    own_redis.stop()
    wait_until(lambda: "Cannot connect" in machine.log())
    own_redis.start()
    wait_until(lambda: sink.poll() is not None or len(storage.open(store.path)) == 10)
    wait_until(lambda: sink.poll() is not None or machine.client.hlen(UNACKED) == 0)
    assert sink.poll() is None
    assert sorted(storage.open(store.path).ids) == sorted(prompt.id for prompt in make_prompts("B1", 10))
    assert machine.log().count("Connection to broker lost") == 1
    assert "Traceback" not in machine.log()
