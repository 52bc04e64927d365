"""Real sink processes under Celery: killed between any two steps, without a disk, for another run."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import storage
from storage.store import Store
from tests.workers.sink.killing_steps import STEPS
from tests.workers.sink.machine import Machine, wait_until
from tests.workers.sink.making import (
    make_failure,
    make_prompts,
    make_response,
    make_store,
    make_values,
)
from workers.board.board import read_board
from workers.broker.keys import FEEDER, GARBAGE, UNACKED
from workers.broker.messages import Failed, Responded
from workers.broker.publish import publish_many
from workers.runs import claim, finish, read_carried


@pytest.fixture
def machine(redis_url: str, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(redis_url, tmp_path)
    yield machine
    machine.end()


def assert_all_stored(store: Store, count: int, *, first: int = 0) -> None:
    """Every sample visible once, its states those of its response."""
    prompts = make_prompts("B1", count, first=first)
    samples = storage.open(store.path)
    assert len(samples) == count
    assert sorted(samples.ids) == sorted(prompt.id for prompt in prompts)
    for prompt in prompts:
        assert np.array_equal(samples.sample(prompt.id).states, make_values(make_response(prompt)))


def finished(machine: Machine) -> bool:
    carried = read_carried(machine.client)
    return carried is not None and carried.finished


def settled(machine: Machine) -> bool:
    return machine.client.hlen(UNACKED) == 0 and machine.spool.used_bytes() == 0


def test_a_sink_finds_its_run_feeds_it_stores_it_and_sets_aside_what_is_strange(machine: Machine) -> None:
    store = make_store(machine.folder / "out", {"B1": 40})
    machine.sink()
    wait_until(lambda: machine.snapshot() is not None)
    assert "there is no run yet" in machine.snapshot().says
    strange = Responded(run="f" * 32, response=make_response(make_prompts("B2", 1)[0]))
    publish_many(machine.app, [strange])
    machine.app.send_task("store", args=(b"garbage",), queue="sink")
    claim(machine.client, store.run, store.path)
    machine.lanes(store)
    wait_until(lambda: finished(machine))
    assert_all_stored(store, 40)
    wait_until(lambda: settled(machine))
    wait_until(lambda: machine.snapshot().done == 80 and machine.snapshot().aside == 2)
    assert machine.client.llen(GARBAGE) == 2
    assert machine.snapshot().state == "running"
    assert read_board(machine.client).datasets[0].stored == 40


QUICK = "after states"
"""The step that every test run tries; the others take their time in `make test-slow`."""


@pytest.mark.parametrize(
    "step", [QUICK, *(pytest.param(step, marks=pytest.mark.slow) for step in STEPS if step != QUICK)]
)
def test_a_sink_killed_between_any_two_steps_loses_and_doubles_nothing(machine: Machine, step: str) -> None:
    store = make_store(machine.folder / "out", {"B1": 30})
    claim(machine.client, store.run, store.path)
    dead = make_failure(make_prompts("B1", 1)[0])

    def spoil(result):
        response = getattr(result, "response", None)
        return Failed(run=result.run, failure=dead) if response and response.id == dead.id else result

    first = machine.sink(kill_at=f"{step}:1")
    machine.lanes(store, spoil=spoil)
    wait_until(lambda: first.poll() is not None)
    assert first.returncode == -signal.SIGKILL
    if step == QUICK:
        machine.client.delete(FEEDER)  # the others wait out the lease
    machine.sink()
    wait_until(lambda: finished(machine), 60)
    assert_all_stored(store, 29, first=1)
    assert [failure.id for failure in store.failures()] == [dead.id]
    wait_until(lambda: machine.client.hlen(UNACKED) == 0)


@pytest.mark.slow
def test_a_sink_refuses_another_runs_folder_and_takes_none_of_its_results(machine: Machine) -> None:
    store = make_store(machine.folder / "out", {"B1": 3})
    other = make_store(machine.folder / "other", {"B1": 1})
    claim(machine.client, store.run, store.path)
    machine.sink(name="wrong", output=other.path)
    wait_until(lambda: (s := machine.snapshot("wrong")) and "carries the run of" in s.says)
    publish_many(
        machine.app, [Responded(run=store.run.id, response=make_response(p)) for p in make_prompts("B1", 3)]
    )
    machine.sink(name="right", output=store.path)
    machine.lanes(store)
    wait_until(lambda: finished(machine))
    assert_all_stored(store, 3)
    assert machine.snapshot("wrong").state == "waiting"
    assert machine.snapshot("wrong").done == 0
    # The run ends, and the folder's own begins: the same process serves it.
    finish(machine.client, store.run.id)
    claim(machine.client, other.run, other.path)
    wait_until(lambda: machine.snapshot("wrong").state == "running")


@pytest.mark.slow
def test_a_redis_that_lost_everything_in_mid_run_loses_no_sample(machine: Machine) -> None:
    store = make_store(machine.folder / "out", {"B1": 60})
    claim(machine.client, store.run, store.path)
    machine.sink()
    machine.lanes(store)
    wait_until(lambda: len(list((store.path / "responses").glob("s-*"))) >= 1)
    machine.client.flushall()
    wait_until(lambda: finished(machine), 60)
    assert_all_stored(store, 60)


@pytest.mark.slow
def test_two_sinks_feed_in_turn_and_store_each_sample_once(machine: Machine) -> None:
    store = make_store(machine.folder / "out", {"B1": 60})
    claim(machine.client, store.run, store.path)
    sinks = {name: machine.sink(name=name) for name in ("one", "two")}
    machine.lanes(store)
    wait_until(lambda: (board := read_board(machine.client)) and board.datasets[0].generated >= 5)
    feeding = read_board(machine.client).holder.partition("@")[0]
    os.killpg(sinks[feeding].pid, signal.SIGKILL)
    sinks[feeding].wait()
    wait_until(lambda: finished(machine), 60)
    assert read_board(machine.client).holder.partition("@")[0] != feeding
    assert_all_stored(store, 60)


@pytest.mark.slow
def test_states_lost_in_the_spool_are_captured_again(machine: Machine) -> None:
    store = make_store(machine.folder / "out", {"B1": 8})
    claim(machine.client, store.run, store.path)
    lost: set[bytes] = set()

    def spoil(result):
        states = getattr(result, "states", None)
        if states is not None and states.id not in lost and len(lost) < 3:
            lost.add(states.id)
            (machine.spool.folder / states.spool.name).unlink()
        return result

    machine.sink()
    machine.lanes(store, spoil=spoil)
    wait_until(lambda: finished(machine))
    assert_all_stored(store, 8)
    wait_until(lambda: machine.snapshot().lost == 3)


@pytest.mark.slow
def test_results_that_vanish_are_made_again(machine: Machine) -> None:
    store = make_store(machine.folder / "out", {"B1": 5})
    claim(machine.client, store.run, store.path)
    left = [1, 1]
    machine.sink()
    machine.lanes(store, spoil=lambda result: left.pop() and None if left else result)
    wait_until(lambda: finished(machine))
    assert_all_stored(store, 5)
    assert read_board(machine.client).republished >= 1


@pytest.mark.slow
def test_a_sink_that_is_told_to_end_gives_back_what_it_holds(machine: Machine) -> None:
    store = make_store(machine.folder / "out", {"B1": 30})
    claim(machine.client, store.run, store.path)
    first = machine.sink()
    machine.lanes(store)
    wait_until(lambda: (board := read_board(machine.client)) and board.datasets[0].generated >= 1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(20) == 0
    assert machine.snapshot() is None
    assert machine.client.hlen(UNACKED) == 0
    machine.sink()
    wait_until(lambda: finished(machine))
    assert_all_stored(store, 30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB; skipped where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_sink_waits_on_a_full_disk_says_so_and_goes_on_by_itself(
    redis_url: str, tmp_path: Path, small_disk: Path
) -> None:
    machine = Machine(redis_url, tmp_path)
    try:
        store = make_store(small_disk / "out", {"B1": 20})
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 16_384))
        claim(machine.client, store.run, store.path)
        machine.sink()
        machine.lanes(store)
        wait_until(lambda: (s := machine.snapshot()) and s.state == "paused")
        assert "full" in machine.snapshot().says or "room" in machine.snapshot().says
        wait_until(lambda: machine.snapshot().says in " ".join(read_board(machine.client).notes))
        wait_until(lambda: machine.snapshot().in_flight == 20)
        ballast.unlink()
        wait_until(lambda: finished(machine))
        assert machine.snapshot().state == "running"
        assert_all_stored(store, 20)
    finally:
        machine.end()
