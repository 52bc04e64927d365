"""Redis stopped while a sink holds results: the same process goes on, and says so in a few lines."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import storage
from producer.machine.redis_server import find_redis, free_port, redis_arguments
from tests.workers.sink.machine import Machine, wait_until
from tests.workers.sink.making import make_prompts, make_response, make_states, make_store
from workers.broker.keys import UNACKED
from workers.broker.messages import Responded
from workers.broker.publish import publish_many
from workers.runs import claim


class OwnRedis:
    """A Redis that keeps its data when it is stopped."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.port = free_port()
        self.arguments = redis_arguments(find_redis(), folder=folder, port=self.port, password=None)
        self.arguments += ["--appendfsync", "always"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        with redis.Redis(port=self.port) as client:
            wait_until(lambda: _answers(client))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    own = OwnRedis(tmp_path / "redis")
    yield own
    own.stop()


@pytest.fixture
def machine(own_redis: OwnRedis, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(f"redis://127.0.0.1:{own_redis.port}/0", tmp_path)
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
