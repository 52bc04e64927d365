"""Who feeds: `enqueue` when nobody does, a sink otherwise, and whoever is left when one dies."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from storage.errors import UnavailableError
from storage.run import StatesMode
from storage.settings import DatasetSettings, write_settings
from storage.store import Store
from tests.workers.sink.machine import Machine, wait_until
from tests.workers.sink.making import make_prompts, make_response, make_settings, make_store
from workers.board.board import read_board
from workers.board.processes import ProcessSnapshot, anyone_listening, write_process
from workers.broker.keys import FEEDER, WINDOW
from workers.feeder.feeding import feed_first_window, feed_while_free, keep_feeding
from workers.feeder.role import Role, holder_of
from workers.runs import claim, read_carried, read_view


@pytest.fixture
def machine(redis_url: str, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(redis_url, tmp_path)
    yield machine
    machine.end()


@pytest.fixture
def store(machine: Machine) -> Store:
    store = make_store(machine.folder / "out", {"B1": 20}, states=StatesMode.OFF)
    claim(machine.client, store.run, store.path)
    return store


def test_enqueue_publishes_the_first_window_and_leaves_the_role(machine: Machine, store: Store) -> None:
    told: list[int] = []
    window = feed_first_window(machine.app.config, store, told.append)
    assert (window.published, window.waiting, window.finished, window.holder) == (20, 20, False, None)
    assert told[-1] == 20
    assert machine.client.llen("short") == 20
    assert machine.client.hlen(WINDOW) == 20
    assert holder_of(machine.client) is None
    assert read_view(machine.client).run == store.run


def test_enqueue_again_publishes_nothing_twice(machine: Machine, store: Store) -> None:
    feed_first_window(machine.app.config, store)
    window = feed_first_window(machine.app.config, store)
    assert (window.published, window.waiting) == (0, 20)
    assert machine.client.llen("short") == 20


def test_enqueue_of_a_finished_run_says_so(machine: Machine, store: Store) -> None:
    store.commit_responses([make_response(prompt) for prompt in make_prompts("B1", 20)])
    window = feed_first_window(machine.app.config, store)
    assert window.finished
    assert read_carried(machine.client).finished


def test_enqueue_leaves_feeding_to_a_sink_that_does(machine: Machine, store: Store) -> None:
    here = ProcessSnapshot(name="sink@h", lane="sink", node="n", pid=1, at=0, started=0)
    write_process(machine.client, here)
    with Role(machine.client, "sink@h") as role:
        assert role.take()
        window = feed_first_window(machine.app.config, store)
    assert window.holder == role.holder
    assert machine.client.llen("short") == 0


def test_a_redis_that_takes_no_writes_is_explained_to_enqueue(machine: Machine, store: Store) -> None:
    machine.client.config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(UnavailableError) as caught:
            feed_first_window(machine.app.config, store)
    finally:
        machine.client.config_set("min-replicas-to-write", 0)
    assert caught.value.code == "redis.refuses"
    assert "NOREPLICAS" in caught.value.message


def test_enqueue_waits_out_the_lease_of_one_that_was_killed(machine: Machine, store: Store) -> None:
    machine.client.set(FEEDER, "enqueue@dead 1", px=1000)
    assert feed_first_window(machine.app.config, store).published == 20


def test_of_two_that_feed_one_does_at_a_time_and_the_other_follows(machine: Machine, store: Store) -> None:
    published: list[tuple[str, int]] = []
    stops = {name: threading.Event() for name in ("one", "two")}

    def feed(name: str) -> None:
        def publish(messages) -> None:
            published.append((name, len(messages)))

        while not stops[name].wait(0.05):
            feed_while_free(
                store=store, redis=machine.client, publish=publish, name=name, stopping=stops[name]
            )

    threads = [threading.Thread(target=feed, args=(name,)) for name in stops]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: published)
        first = published[0][0]
        assert published == [(first, 20)]
        stops[first].set()
        wait_until(lambda: (holder_of(machine.client) or first).split()[0] != first)
        write_settings(store.path, make_settings(StatesMode.OFF, B1=DatasetSettings(max_samples=5)))
        wait_until(lambda: read_view(machine.client).settings.datasets["B1"].max_samples == 5)
        assert published == [(first, 20)], "what is out is taken over"
    finally:
        for stop in stops.values():
            stop.set()
        for thread in threads:
            thread.join()


def test_settings_that_change_reach_the_lanes_within_a_second(machine: Machine, store: Store) -> None:
    stopping = threading.Event()
    thread = threading.Thread(target=keep_feeding, args=(machine.app.config, store, stopping))
    thread.start()
    try:
        wait_until(lambda: read_board(machine.client) is not None)
        write_settings(store.path, make_settings(StatesMode.OFF, B1=DatasetSettings(max_samples=7)))
        wait_until(lambda: read_view(machine.client).settings.datasets["B1"].max_samples == 7, 1)
    finally:
        stopping.set()
        thread.join()


def test_who_listens_is_who_has_said_something_lately(client: redis.Redis) -> None:
    assert not anyone_listening(client).lanes
    write_process(client, ProcessSnapshot(name="a", lane="short", node="n", pid=1, at=0, started=0))
    write_process(client, ProcessSnapshot(name="b", lane="sink", node="n2", pid=1, at=0, started=0))
    listening = anyone_listening(client)
    assert listening.lanes == {"short"}
    assert listening.sink_nodes == {"n2"}
