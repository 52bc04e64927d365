"""What crashes leave in the spool goes, early when nobody can be waiting for it."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import redis

from storage.spool import Spool
from storage.store import Store
from tests.workers.sink.making import make_spec
from workers.board.processes import write_process
from workers.broker.keys import WINDOW
from workers.runs import claim_if_absent, finish
from workers.sink.status import SinkStatus
from workers.sink.sweeping import EVERY_S, IDLE_S, LOOK_S, WAITED_FOR_S, Sweeper


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def aged(spool: Spool, name: str, age_s: float) -> Path:
    spool.write(name, np.ones((1, 1, 4), np.uint16))
    at = time.time() - age_s
    os.utime(spool.folder / name, (at, at))
    return spool.folder / name


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_files_that_no_result_names_do_not_hold_the_spool_full_for_a_day(
    client: redis.Redis, spool: Spool, clock: Clock
) -> None:
    orphan, young = aged(spool, "orphan", IDLE_S + 60), aged(spool, "young", IDLE_S / 2)
    sweeper = Sweeper(client, spool, clock)
    sweeper.look(None)
    assert orphan.exists(), "a result may be between two processes: one look tells nothing"
    clock.now += EVERY_S
    sweeper.look(None)
    assert not orphan.exists()
    assert young.exists()


@pytest.mark.parametrize("where", ["queue", "sink"])
def test_while_results_wait_for_the_node_only_files_of_a_day_ago_go(
    client: redis.Redis, spool: Spool, clock: Clock, where: str
) -> None:
    waited_for, old = aged(spool, "waited-for", IDLE_S + 60), aged(spool, "old", WAITED_FOR_S + 60)
    if where == "queue":
        client.lpush(f"sink.{spool.node}", b"a result")
    else:
        busy = SinkStatus().snapshot(name="other@test", node=spool.node, held=1, spool=spool, output=None)
        write_process(client, busy)
    sweeper = Sweeper(client, spool, clock)
    for _ in range(3):
        sweeper.look(None)
        clock.now += EVERY_S
    assert waited_for.exists()
    assert not old.exists()


def test_a_sink_whose_folder_is_away_still_says_how_it_is(spool: Spool, tmp_path: Path) -> None:
    said = SinkStatus().snapshot(name="a@b", node="n", held=0, spool=spool, output=tmp_path / "away")
    assert said.disk_free_bytes is None


def test_what_crashes_left_goes_once_the_run_is_finished_and_not_before(
    client: redis.Redis, spool: Spool, clock: Clock, tmp_path: Path
) -> None:
    store = Store.create(tmp_path / "out", make_spec())
    staging = store.path / ".staging" / "sink.killed"
    staging.mkdir(parents=True)
    orphan, young = aged(spool, "orphan", 70), aged(spool, "young", 30)
    os.utime(staging, (time.time() - 70,) * 2)
    claim_if_absent(client, store.run, store.path)
    sweeper = Sweeper(client, spool, clock, settle_s=60)
    sweeper.look(store)
    finish(client, store.run.id)
    client.hset(WINDOW, b"an order that is out", 1)
    clock.now += LOOK_S
    sweeper.look(store)
    assert orphan.exists()
    assert staging.exists()
    client.delete(WINDOW)
    clock.now += LOOK_S
    sweeper.look(store)
    assert not orphan.exists()
    assert not staging.exists()
    assert young.exists()
