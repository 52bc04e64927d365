"""How long it takes to know what is left of a run with a million stored samples.

    python -m ops.bench.resume [--quick] [--ids 1000000] [--segment 1000] [--folder DIR]

A store of the ids' size is made first (segments as the sink writes them, but tensors of two
bytes a token); then a process of its own opens it and counts what is wanted, as a feeder that
begins does. The seconds are those this process computed; on a busy machine it waits for others too.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.bench.report import Row, print_rows, say
from storage.index import Index, wanted
from storage.run import CaptureSpec, DatasetSpec, RunSpec, Sampling, StatesMode
from storage.segment import SegmentName, Staging
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
    (path / "states" / CAPTURE.name).mkdir()
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
            columns = {
                "id": ids,
                "digest": digests,
                "dataset": np.zeros(n, np.uint16),
                "offset": np.arange(n + 1, dtype=np.int64) * 2 * TOKENS,
                "finish": np.zeros(n, np.uint8),
            }
            commit(store, "responses", SegmentName(node=None, seq=seq), columns, samples=n, datasets=[name])
            commit(
                store,
                f"states/{CAPTURE.name}",
                SegmentName(node="node1", seq=seq),
                {"id": ids, "digest": digests},
                samples=n,
            )


def decide(path: str) -> None:
    """What the child process runs: the decision, and a look that finds nothing new."""
    begun, cpu = time.perf_counter(), time.process_time()
    store = Store.open(Path(path))
    index = Index(store, CAPTURE.name)
    index.refresh()
    found = [wanted(index.dataset(name), DatasetSettings(), StatesMode.REPLAY) for name in index.datasets]
    decided, cpu = time.perf_counter(), time.process_time() - cpu
    index.refresh()
    say(
        f"resume segments={len(index.responses.segments) * 2}"
        f" missing={sum(len(counts.missing) for counts in found)}"
        f" wall_s={decided - begun:.2f} next_look_s={time.perf_counter() - decided:.3f}"
    )
    what = f"resume decision for {sum(counts.total for counts in found)} ids"
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
        program = "import sys; from ops.bench.resume import decide; decide(sys.argv[1])"
        subprocess.run([sys.executable, "-c", program, str(Path(name) / "out")], check=True)


if __name__ == "__main__":
    main()
