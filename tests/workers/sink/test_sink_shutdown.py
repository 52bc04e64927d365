"""A sink that is told to end while its commit hangs: out within its grace, and nothing is lost."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage
from tests.workers.sink.machine import TIMING, Machine, wait_until
from tests.workers.sink.making import make_prompts, make_store
from workers.broker.celeryconfig import TIMING_VARIABLE
from workers.broker.keys import UNACKED
from workers.runs import claim, read_carried

DRAIN_S, EXIT_S, SLACK_S = 1, 1, 20


@pytest.fixture
def machine(redis_url: str, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(redis_url, tmp_path)
    machine.environ[TIMING_VARIABLE] = json.dumps(TIMING | {"drain_s": DRAIN_S, "exit_s": EXIT_S})
    yield machine
    machine.end()


@pytest.mark.parametrize("step", ["before states", "before responses", "before acknowledging"])
def test_a_sink_whose_commit_hangs_is_out_within_its_grace(machine: Machine, step: str) -> None:
    store = make_store(machine.folder / "out", {"B1": 10})
    claim(machine.client, store.run, store.path)
    first = machine.sink(kill_at=f"{step}:1:hang")
    machine.lanes(store)
    wait_until(lambda: "hanging" in machine.log())
    first.send_signal(signal.SIGTERM)
    assert first.wait(DRAIN_S + EXIT_S + SLACK_S) == 0
    machine.sink(name="second")
    wait_until(lambda: (carried := read_carried(machine.client)) is not None and carried.finished, 80)
    assert sorted(storage.open(store.path).ids) == sorted(prompt.id for prompt in make_prompts("B1", 10))
    wait_until(lambda: machine.client.hlen(UNACKED) == 0)
