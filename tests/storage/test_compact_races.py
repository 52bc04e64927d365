"""Two nodes commit, readers iterate, and compactions are killed: real processes, all at once."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compact_making import compacted, quiet
from store_making import tensor_of
from test_store_races import begin, read_acknowledged, store_for_writers

import storage
from storage.catalog import Catalog
from storage.reader import Samples
from storage.store import Store
from storage.tokens import response_digest
from storage.verify import verify

KEPT_S = 3.0
"""Longer than a listing takes, so short that there are deletions while the others work."""


def begin_compaction(path: Path) -> subprocess.Popen[bytes]:
    """One after the other, for as long as it lives."""
    program = (
        "import sys; from compact_making import compacted; from pathlib import Path\n"
        f"while True: compacted(Path(sys.argv[1]), kept_s={KEPT_S})"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    if process.stderr:
        process.stderr.close()


def assert_readable(path: Path, opened: list[Samples]) -> None:
    """Every sample of those who opened at any time."""
    opened.append(storage.open(path))
    reader = Store.open(path)
    for samples in opened:
        for sample in samples:
            response = reader.response(sample.id)
            assert response_digest(sample.tokens) == response.digest
            assert np.array_equal(sample.states, tensor_of(response))


def compaction_rounds(tmp_path: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    seeds = [1, 2]
    store = store_for_writers(tmp_path, seeds)
    acknowledged: dict[str, set[bytes]] = {"responses": set(), "states": set()}
    writers = [begin(store, tmp_path / f"spool{n}", f"node{n}", n) for n in seeds]
    compaction = begin_compaction(store.path)
    opened: list[Samples] = []
    merged = 0
    try:
        for _ in range(kills):
            for writer in writers:
                read_acknowledged(writer, acknowledged, 2)
            if acknowledged["states"] and len(opened) < 3:
                assert_readable(store.path, opened)
            try:
                compaction.wait(chance.uniform(0, 0.3))
            except subprocess.TimeoutExpired:
                compaction.send_signal(signal.SIGKILL)
            assert compaction.wait() == -signal.SIGKILL, compaction.stderr.read().decode()
            end(compaction)
            states = Catalog(store.path / "states/eagle3")
            states.refresh()
            merged = max(merged, states.last_seq("merged"))
            compaction = begin_compaction(store.path)
        if not merged:  # so loaded a machine that none came to an end: the last one shall
            compacted(store.path, kept_s=0)
    finally:
        for process in (*writers, compaction):
            end(process)
    for writer in writers:
        read_acknowledged(writer, acknowledged)
    compacted(store.path, kept_s=0)
    assert acknowledged["responses"]
    assert_readable(store.path, opened)
    reader = Store.open(store.path)
    for key in acknowledged["responses"]:
        assert reader.response(key).id == key
    assert acknowledged["states"] <= set(storage.open(store.path).ids)
    report = verify(store.path, quiet())
    assert report.problems == ()
    assert report.samples["states"] == len(storage.open(store.path)), "no states are stored twice any more"


def test_two_nodes_commit_and_readers_read_while_compactions_are_killed(tmp_path: Path):
    compaction_rounds(tmp_path, kills=3, seed=0)


@pytest.mark.slow
def test_forty_killed_compactions_lose_and_double_nothing(tmp_path: Path):
    compaction_rounds(tmp_path, kills=40, seed=1)
