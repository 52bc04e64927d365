"""A real sink that outlives its output folder commits nothing into the run that takes its place."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import storage
from storage.segment import list_segments
from tests.workers.sink.machine import Machine, wait_until
from tests.workers.sink.making import make_prompts, make_response, make_store
from workers.broker.keys import UNACKED
from workers.broker.messages import Responded
from workers.broker.publish import publish_many
from workers.runs import claim, finish, read_carried


@pytest.fixture
def machine(redis_url: str, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(redis_url, tmp_path)
    yield machine
    machine.end()


def test_results_of_an_old_run_are_not_committed_into_a_new_one_in_its_folder(machine: Machine) -> None:
    store = make_store(machine.folder / "out", {"B1": 10})
    claim(machine.client, store.run, store.path)
    machine.sink()
    wait_until(lambda: (s := machine.snapshot()) and s.state == "running")
    old = [Responded(run=store.run.id, response=make_response(p)) for p in make_prompts("B1", 10)]
    publish_many(machine.app, old[:5])
    wait_until(lambda: machine.snapshot().in_flight or machine.snapshot().done)
    store.path.rename(machine.folder / "elsewhere")
    other = make_store(machine.folder / "out", {"B1": 10})
    publish_many(machine.app, old[5:])
    wait_until(lambda: machine.snapshot().state == "waiting")
    says = machine.snapshot().says
    assert f"`{store.path}` holds run `{other.run.id}` now, not run `{store.run.id}`" in says
    # What is not stored is still somewhere in Redis: nothing was acknowledged for it.
    stored = sum(1 for _ in list_segments(machine.folder / "elsewhere/responses")) * 5
    wait_until(lambda: machine.client.llen("sink") + machine.client.hlen(UNACKED) >= 10 - stored)
    assert list_segments(other.path / "responses") == []
    assert list((other.path / "facts").iterdir()) == []
    finish(machine.client, store.run.id)
    claim(machine.client, other.run, other.path)
    machine.lanes(other)
    wait_until(lambda: (c := read_carried(machine.client)) and c.finished, 90)
    assert sorted(storage.open(other.path).ids) == sorted(p.id for p in make_prompts("B1", 10))
