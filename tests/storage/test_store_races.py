"""Several real processes commit to one store, some killed on the way: nothing lost, torn or twice."""

import io
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from store_making import add_all, new_store, tensor_of
from store_writer import all_prompts

import storage
from storage.columns import ids_list
from storage.progress import Progress
from storage.segment import Segment, list_segments
from storage.store import Store
from storage.tokens import response_digest
from storage.verify import verify

WRITER = Path(__file__).with_name("store_writer.py")


def begin(store: Store, spool: Path, node: str, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(store.path), str(spool), node, str(seed)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def read_acknowledged(
    process: subprocess.Popen[str], acknowledged: dict[str, set[bytes]], lines: int | None = None
) -> None:
    """Take so many lines, or, of a process that has ended, all that are left."""
    assert process.stdout is not None
    for line in process.stdout if lines is None else (process.stdout.readline() for _ in range(lines)):
        if line.endswith("\n"):
            kind, *ids = line.split()
            acknowledged[kind].update(map(bytes.fromhex, ids))
    if lines is None:
        process.stdout.close()


def assert_invariants(store: Store, acknowledged: dict[str, set[bytes]]) -> None:
    """Every acknowledged response and its states are visible, once, whole; so is all else that is."""
    seen: Counter[bytes] = Counter()
    for name in list_segments(store.path / "responses"):
        seen.update(ids_list(Segment(store.path / "responses", name).column("id")))
    assert not [key for key, count in seen.items() if count > 1], "a prompt with two responses"
    assert acknowledged["responses"] <= set(seen)
    samples = storage.open(store.path)
    assert acknowledged["states"] <= set(samples.ids)
    reader = Store.open(store.path)
    for key in seen:
        response = reader.response(key)
        assert response_digest(response.tokens) == response.digest
    for sample in samples:
        assert np.array_equal(sample.states, tensor_of(reader.response(sample.id)))
    assert verify(store.path, Progress("verifying", io.StringIO())).problems == ()


def store_for_writers(path: Path, seeds: list[int]) -> Store:
    """A store whose prompts are all that writers with these seeds commit."""
    store = new_store(path / "out")
    add_all(store, all_prompts(seeds))
    return store


def test_four_processes_that_commit_at_once_store_each_sample_once(tmp_path: Path):
    seeds = [1, 2, 3, 4]
    store = store_for_writers(tmp_path, seeds)
    acknowledged: dict[str, set[bytes]] = {"responses": set(), "states": set()}
    processes = [begin(store, tmp_path / f"spool{seed}", f"node{seed}", seed) for seed in seeds]
    try:
        for process in processes:
            read_acknowledged(process, acknowledged, 10)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process in processes:
        read_acknowledged(process, acknowledged)
    assert len(acknowledged["states"]) > 60
    assert_invariants(store, acknowledged)


def kill_rounds(tmp_path: Path, kills: int, seed: int) -> None:
    """Two writers are killed in turn at random moments; one goes on while the other begins anew."""
    chance = random.Random(seed)
    seeds = list(range(1, kills + 3))
    store = store_for_writers(tmp_path, seeds)
    acknowledged: dict[str, set[bytes]] = {"responses": set(), "states": set()}
    living = [begin(store, tmp_path / "spool", "node1", seeds.pop()) for _ in range(2)]
    try:
        for _ in range(kills):
            process = living.pop(0)
            read_acknowledged(process, acknowledged, chance.randint(1, 3))
            # A moment inside the commit that follows the acknowledgement just read.
            try:
                process.wait(timeout=chance.uniform(0, 0.03))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            process.wait()
            read_acknowledged(process, acknowledged)
            living.append(begin(store, tmp_path / "spool", "node1", seeds.pop()))
    finally:
        for process in living:
            process.kill()
            process.wait()
    for process in living:
        read_acknowledged(process, acknowledged)
    assert_invariants(store, acknowledged)
    store.sweep_staging(0)
    assert list((store.path / ".staging").iterdir()) == []


def test_writers_killed_at_random_moments_lose_and_tear_nothing(tmp_path: Path):
    kill_rounds(tmp_path, kills=5, seed=0)


@pytest.mark.slow
def test_sixty_kills_lose_and_tear_nothing(tmp_path: Path):
    kill_rounds(tmp_path, kills=60, seed=1)
