"""How long it takes to know what is left of a run with a million stored samples.

    python -m ops.bench.resume [--quick] [--ids 1000000] [--segment 1000] [--folder DIR]

A store of the ids' size is made first (segments as the sink writes them, but tensors of two
bytes a token); then a process of its own opens it and counts what is wanted, as a feeder that
begins does: over the segments as they were written, beside those that a compaction has merged
them into, and when what was replaced is deleted. The seconds are those this process computed; on
a busy machine it waits for others too.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.bench.report import Row, print_rows, say
from storage.compact import compact
from storage.index import Index, wanted
from storage.progress import Progress
from storage.run import CaptureSpec, DatasetSpec, RunSpec, Sampling, StatesMode
from storage.segment import SegmentName, Staging, create_group, list_segments
from storage.settings import DatasetSettings
from storage.store import Store

CAPTURE = CaptureSpec(name="eagle3", hs_indices=(1,), norm="none", hidden_size=1)
SPEC = RunSpec(
    model="bench",
    tokenizer_digest="",
    template_digest="",
    vocab_size=1,
    sampling=Sampling(),
    short_max_tokens=1,
    long_max_tokens=1,
    states=StatesMode.REPLAY,
    capture=CAPTURE,
)
DATASETS = 10
TOKENS = 4
PROMPTS_A_SEGMENT = 10_000


class QuickStaging(Staging):
    """Without fsync: what is measured is reading, and making a store would take hours."""

    def finish(self, attributes: dict[str, object]) -> None:  # type: ignore[override]
        from storage.arrays import write_metadata

        write_metadata(self.path, {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})


def ids_of(numbers: NDArray[np.int64], what: bytes) -> NDArray[np.uint8]:
    """An id for each number, as even as a hash: uint8 [N, 16]."""
    raw = b"".join(
        hashlib.blake2b(what + int(n).to_bytes(8, "little"), digest_size=16).digest() for n in numbers
    )
    return np.frombuffer(raw, np.uint8).reshape(-1, 16)


def commit(
    store: Store, folder: str, name: SegmentName, columns: dict[str, object], **attributes: object
) -> None:
    with QuickStaging(store.path, "bench", store.codec) as staging:
        for column, values in columns.items():
            staging.plain(column, np.asarray(values))
        staging.finish(attributes)
        assert staging.commit(store.path / folder, name)


def make(path: Path, count: int, per_segment: int) -> None:
    """A run of `count` samples, nine tenths of them stored."""
    store = Store.create(path, SPEC)
    create_group(path / "states" / CAPTURE.name, {})
    each = count // DATASETS
    seq = 0
    for number in range(DATASETS):
        name = f"B{number}"
        store.begin_dataset(
            DatasetSpec(
                name=name, source="", source_digest="", form="", column="", lane="short", semantics={}
            )
        )
        for at, first in enumerate(range(0, each, PROMPTS_A_SEGMENT), start=1):
            rows = np.arange(first, min(first + PROMPTS_A_SEGMENT, each)) + number * each
            columns = {"id": ids_of(rows, b"id"), "offset": np.arange(len(rows) + 1, dtype=np.int64) * TOKENS}
            state = {"next_row": int(rows[-1]) + 1, "complete": True, "dropped": {}}
            segment = SegmentName(node=None, seq=at)
            commit(store, f"prompts/{name}", segment, columns, samples=len(rows), **state)
        for first in range(0, each * 9 // 10, per_segment):
            rows = np.arange(first, min(first + per_segment, each * 9 // 10)) + number * each
            ids, digests, n = ids_of(rows, b"id"), ids_of(rows, b"digest"), len(rows)
            seq += 1
            keys = {"id": ids, "digest": digests, "facts": np.zeros(n, np.uint16)}
            offset = np.arange(n + 1, dtype=np.int64) * 2 * TOKENS
            named: dict[str, object] = {"samples": n, "facts": ["f"]}
            responses = {
                **keys,
                "dataset": np.zeros(n, np.uint16),
                "offset": offset,
                "tokens": np.zeros(n * 2 * TOKENS, np.int32),
                "prompt_length": np.full(n, TOKENS, np.int32),
                "span_offset": np.zeros(n + 1, np.int64),
                "spans": np.zeros((0, 5), np.int32),
                "text_offset": np.zeros(n + 1, np.int64),
                "text": np.zeros(0, np.uint8),
                "finish": np.zeros(n, np.uint8),
                "counts": np.zeros((n, 3), np.int32),
                "timings": np.zeros((n, 3)),
            }
            commit(store, "responses", SegmentName(node=None, seq=seq), responses, **named, datasets=[name])
            states = {
                **keys,
                "offset": offset,
                "crc32": np.full(n, zlib.crc32(bytes(2 * 2 * TOKENS)), np.uint32),
                "states": np.zeros((n * 2 * TOKENS, 1, 1), np.uint16),
            }
            folder = f"states/{CAPTURE.name}"
            commit(store, folder, SegmentName(node="node1", seq=seq), states, **named)


def decide(path: str, when: str) -> None:
    """What the child process runs: the decision, and a look that finds nothing new."""
    begun, cpu = time.perf_counter(), time.process_time()
    store = Store.open(Path(path))
    index = Index(store, CAPTURE.name)
    index.refresh()
    found = [wanted(index.dataset(name), DatasetSettings(), StatesMode.REPLAY) for name in index.datasets]
    decided, cpu = time.perf_counter(), time.process_time() - cpu
    index.refresh()
    say(
        f"resume {when}: segments={len(list_segments(store.path / 'responses')) * 2}"
        f" missing={sum(len(counts.missing) for counts in found)}"
        f" wall_s={decided - begun:.2f} next_look_s={time.perf_counter() - decided:.3f}"
    )
    what = f"resume decision for {sum(counts.total for counts in found)} ids, {when}"
    print_rows([Row(what=what, measured=round(cpu, 2), at_most=2, unit="s")])


def main() -> None:
    """Make the store, let a child decide."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to make the store; default: a temporary folder")
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--segment", type=int, default=1000, help="samples of a segment")
    parser.add_argument("--quick", action="store_true", help="small: shows only that it runs")
    arguments = parser.parse_args()
    ids = 20_000 if arguments.quick else arguments.ids
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        make(Path(name) / "out", ids, arguments.segment)
        path = Path(name) / "out"
        program = "import sys; from ops.bench.resume import decide; decide(*sys.argv[1:])"

        def decided(when: str) -> None:
            subprocess.run([sys.executable, "-c", program, str(path), when], check=True)

        segments = 2 * len(list_segments(path / "responses"))
        decided(f"{segments} segments")
        for kept_s, when in ((3600.0, "compacted"), (0.0, "the old ones deleted")):
            begun = time.perf_counter()
            with Progress("compacting") as progress:
                report = compact(path, progress, kept_s=kept_s)
            merged = sum(folder.merged for folder in report.folders)
            took = time.perf_counter() - begun
            say(f"compact merged={merged} deleted={report.deleted_segments} s={took:.2f}")
            decided(when)


if __name__ == "__main__":
    main()
