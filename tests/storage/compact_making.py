"""Stores with many small segments, and a compaction as a process of its own."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from store_making import (
    CAPTURE,
    add_all,
    make_failure,
    make_prompts,
    make_response,
    make_states,
    new_store,
    tensor_of,
)

import storage
from storage.compact import CompactReport, FolderReport, compact
from storage.progress import Progress
from storage.sample import Response, States
from storage.segment import SegmentName, Staging, list_segments
from storage.spool import Spool
from storage.states import stage_states
from storage.store import Store

DAY_S = 24 * 3600.0


def quiet() -> Progress:
    return Progress("compacting", io.StringIO())


def many_segments(
    path: Path, samples: int = 24, each: int = 4, failing: int = 2
) -> tuple[Store, Spool, list[Response]]:
    """`samples` stored ones, `each` a segment of each kind; the first of each segment failed before."""
    store, spool = new_store(path), Spool(path.parent / "spool", "node1", 1 << 40)
    prompts = make_prompts(samples)
    add_all(store, prompts)
    store.write_facts("f1", {})
    responses = [make_response(prompt) for prompt in prompts]
    for first in range(0, samples, each):
        part = slice(first, first + each)
        store.commit_failures([make_failure(prompt) for prompt in prompts[part][:failing]])
        store.commit_failures(
            [make_failure(p, r.digest) for p, r in zip(prompts[part], responses[part], strict=True)][:failing]
        )
        store.commit_responses(responses[part])
        store.commit_states([make_states(response, spool) for response in responses[part]], spool)
    return store, spool, responses


def store_again(store: Store, batch: list[States], spool: Spool, seq: int = 1) -> str:
    """Commit states that are stored already, as another node does that has not looked yet."""
    folder = store.path / "states" / CAPTURE.name
    with Staging(store.path, spool.node, store.codec) as staging:
        stage_states(staging, batch, spool)
        name = SegmentName(node=spool.node, seq=seq)
        assert staging.commit(folder, name)
    return str(name)


def folder_of(report: CompactReport, name: str) -> FolderReport:
    return next(folder for folder in report.folders if folder.folder == name)


def names(folder: Path) -> list[str]:
    return [str(name) for name in list_segments(folder)]


def compacted(path: Path, kept_s: float = DAY_S, now: float | None = None) -> CompactReport:
    return compact(path, quiet(), kept_s=kept_s, clock=lambda: time.time() if now is None else now)


def assert_all_there(path: Path, responses: list[Response]) -> None:
    samples = storage.open(path)
    assert sorted(samples.ids) == sorted(response.id for response in responses)
    for response in responses:
        sample = samples.sample(response.id)
        assert np.array_equal(sample.states, tensor_of(response))
        assert np.array_equal(sample.tokens, response.tokens)
        assert sample.text == response.text


def storage_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as people type it, in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EYAS_")}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", "from storage.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
