"""Orders that run twice: real lanes and a real sink; stored once, and what it cost is counted."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from broker_stage import SPEC, Stage, until

from storage.run import Run
from storage.segment import Segment, SegmentName
from storage.settings import DatasetSettings, write_settings
from storage.store import Store
from workers.board.board import Board, read_board
from workers.runs import claim


def with_store(stage: Stage, folder: Path) -> Store:
    """A store that commits what the stage's lanes make, as its run."""
    store = Store.create(folder, SPEC)
    stage.view = replace(stage.view, run=Run(id=store.run.id, spec=store.run.spec), output_dir=str(folder))
    write_settings(folder, replace(stage.view.settings, datasets={"B1": DatasetSettings()}))
    claim(stage.redis, store.run, folder)
    return store


def start_sink(stage: Stage) -> None:
    stage.worker("sink", capacity=1)
    until(lambda: (s := stage.snapshot("sink")) and s["state"] == "running", "the sink runs")


def wasted(stage: Stage, calls: int) -> Board:
    found: Board = until(
        lambda: (b := read_board(stage.redis)) and b.wasted == calls and b, f"{calls} calls are wasted"
    )
    return found


@pytest.mark.slow
def test_a_call_repeated_after_a_lost_lease_is_stored_once_and_counted(stage: Stage, tmp_path: Path) -> None:
    store = with_store(stage, tmp_path / "store")
    server = stage.server(seconds=60)
    settings = replace(stage.view.settings, server_urls=(server.url,))
    write_settings(store.path, replace(settings, datasets={"B1": DatasetSettings()}))
    stage.settings(server_urls=(server.url,))
    orders = [replace(order, run=store.run.id) for order in stage.orders(4)]
    stage.publish(orders)
    stopped = stage.worker(name="one", capacity=4)
    until(lambda: server.stats()["in_flight"] == 4, "all orders run")
    # Nothing renews its leases now; its server goes on, and so do its calls once it wakes.
    stopped.signal(signal.SIGSTOP)
    server.set(seconds=0.2)
    stage.worker(name="two", capacity=4)
    start_sink(stage)
    until(lambda: len(store_ids(store)) == 4, "another process ran them, and they are stored", within_s=40)
    server.set(seconds=60, release=True)
    stopped.signal(signal.SIGCONT)
    board = wasted(stage, 4)
    assert board.wasted_tokens == 4 * 16
    assert store_ids(store) == sorted(order.id for order in orders)


def test_two_publications_of_the_same_orders_are_stored_once(stage: Stage, tmp_path: Path) -> None:
    """As two runs of `enqueue` at once may make them, each in a process of its own."""
    store = with_store(stage, tmp_path / "store")
    server = stage.server(seconds=60)
    write_settings(store.path, replace(stage.view.settings, server_urls=(server.url,)))
    stage.settings(server_urls=(server.url,))
    orders = [replace(order, run=store.run.id) for order in stage.orders(3)]
    stage.publish(orders)
    stage.worker(name="one", capacity=3)
    until(lambda: server.stats()["in_flight"] == 3, "one has them all")
    server.set(seconds=0.2)
    stage.publish(orders)
    stage.worker(name="two", capacity=3)
    start_sink(stage)
    until(lambda: len(store_ids(store)) == 3, "the other ran them, and they are stored")
    server.set(seconds=60, release=True)
    until(lambda: not stage.unacked() and not stage.waiting(), "all is done")
    assert wasted(stage, 3).wasted_tokens == 3 * 16
    assert server.stats()["started"] == 6
    assert len(store_ids(store)) == 3


def store_ids(store: Store) -> list[bytes]:
    """Ids of all responses in the store, one an id or not."""
    ids = []
    for segment in (store.path / "responses").glob("s-*"):
        name = SegmentName.parse(segment.name)
        assert name is not None
        ids += [row.tobytes() for row in Segment(store.path / "responses", name).ids("id")]
    return sorted(ids)
