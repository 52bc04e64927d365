"""A sink merges its own small segments in the background: few stay, all is there, commits go first."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import storage
from storage.compaction_plan import MANY
from storage.replaced import replaced
from storage.segment import list_segments
from storage.spool import Spool
from storage.store import Store
from tests.workers.sink.making import (
    CAPTURE,
    make_prompts,
    make_response,
    make_states,
    make_store,
    make_values,
)
from workers.sink import merging
from workers.sink.merging import Merger
from workers.stopping import StoppedError


def fill(path: Path, spool: Spool, count: int, *, first: int = 0) -> Store:
    """So many segments of responses and of states, one sample each."""
    store = make_store(path, {"B1": 2 * MANY + 10}) if first == 0 else Store.open(path)
    for prompt in make_prompts("B1", count, first=first):
        response = make_response(prompt)
        store.commit_responses([response])
        store.commit_states([make_states(spool, response)], spool)
    return store


def visible(store: Store, folder: str) -> list[str]:
    hidden = {one.segment for one in replaced(store.path / folder)}
    return [str(name) for name in list_segments(store.path / folder) if name not in hidden]


def assert_stored(store: Store, count: int) -> None:
    samples = storage.open(store.path)
    prompts = make_prompts("B1", count)
    assert samples.ids == [prompt.id for prompt in prompts]
    for prompt in prompts:
        assert np.array_equal(samples.sample(prompt.id).states, make_values(make_response(prompt)))


def test_a_sink_merges_its_own_past_sixty_four_and_nobody_elses(tmp_path: Path, spool: Spool) -> None:
    store = fill(tmp_path / "out", spool, MANY)
    merger = Merger(spool.node, threading.Event())
    assert merger.look(store) == 0
    fill(store.path, spool, 1, first=MANY)
    other = Spool(tmp_path / "spool2", "node2", 10**9)
    fill(store.path, other, 3, first=MANY + 1)
    assert merger.look(store) == 2
    assert visible(store, "responses") == [f"s-{MANY + 5:08}"]
    assert visible(store, f"states/{CAPTURE.name}") == [
        "s-merged-00000001",
        *(f"s-node2-{at:08}" for at in (1, 2, 3)),
    ]
    assert_stored(store, MANY + 4)
    # What it has merged is its own still, and one of the next that become many.
    fill(store.path, spool, MANY, first=MANY + 4)
    assert merger.look(Store.open(store.path)) == 2
    assert visible(store, f"states/{CAPTURE.name}")[0] == "s-merged-00000002"
    assert_stored(store, 2 * MANY + 4)


def test_a_merge_lets_a_commit_go_first_and_ends_with_the_process(
    tmp_path: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "YIELD_S", 3600.0)
    store = fill(tmp_path / "out", spool, MANY + 1)
    stopping = threading.Event()
    merger = Merger(spool.node, stopping)
    merger.committing.set()
    ended: list[type[Exception]] = []

    def work() -> None:
        try:
            merger.look(store)
        except StoppedError:
            ended.append(StoppedError)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 30
    while not list((store.path / ".staging").glob("merge.*")):
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.01)
    fill(store.path, spool, 1, first=MANY + 1)  # commits meanwhile
    assert len(visible(store, "responses")) == MANY + 2
    stopping.set()
    thread.join(30)
    assert ended == [StoppedError]
    assert list((store.path / ".staging").iterdir()) == []
    assert Merger(spool.node, threading.Event()).look(store) == 2
    assert_stored(store, MANY + 2)
