"""How fast the sink writes hidden states, against a raw file of the same bytes with an fsync.

    python -m ops.bench.sink_write [--quick] [--folder DIR] [--gigabytes 1.2] [--rounds 5]

Raw file and sink take turns in one run, so that the ratio holds on a machine whose speed does
not. The sink's time is all of `Store.commit_states`: reading the spool, checking it, encoding,
writing, making durable, committing. Then one sample of 26 000 × 4 × 7168 (1.5 GB) is committed
by a process of its own, whose peak memory is asked of the kernel.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.bench.report import Row, print_rows, say
from storage.codec import Codec
from storage.run import CaptureSpec, RunSpec, Sampling, StatesMode
from storage.sample import SpoolRef, States
from storage.spool import Spool, spool_name
from storage.store import Store

LAYERS, HIDDEN = 4, 7168
LONG_ROWS = 26_000
"""Rows of the longest sample: 1.5 GB."""
REACH = {Codec.LZ4: 0.65, Codec.NONE: 0.9}
"""Sink write ÷ raw file, at least."""
BLOCK_ROWS = 512
CAPTURE = CaptureSpec(name="eagle3", hs_indices=(2, 30, 58, 61), norm="post", hidden_size=HIDDEN)
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


def block() -> NDArray[np.uint16]:
    """Rows that compress as real hidden states do: normal values, a scale for each channel."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 0.5, HIDDEN)).astype(np.float32)
    values = rng.standard_normal((BLOCK_ROWS, LAYERS, HIDDEN), np.float32) * scale
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def fill_spool(spool: Spool, rows: int, samples: int) -> list[States]:
    """So many samples of so many rows in the spool, in the page cache as a lane leaves them."""
    data, batch = block(), []
    for number in range(samples):
        key = number.to_bytes(16, "little")
        with spool.writer(spool_name(key), (rows, LAYERS, HIDDEN)) as writer:
            for start in range(0, rows, BLOCK_ROWS):
                writer.write(data[: min(BLOCK_ROWS, rows - start)])
            ref = writer.commit()
        batch.append(states_of(key, ref))
    return batch


def states_of(key: bytes, ref: SpoolRef) -> States:
    return States(
        id=key,
        digest=key,
        dataset="bench",
        capture=CAPTURE.name,
        spool=ref,
        facts_id="",
        hs_indices=CAPTURE.hs_indices,
        norm=CAPTURE.norm,
    )


def raw_seconds(path: Path, size_bytes: int) -> float:
    """Write so many bytes from memory into one file, fsync it and its folder."""
    data = block().reshape(-1).view(np.uint8).data
    os.sync()
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left = size_bytes
        while left:
            left -= file.write(data[:left])
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def written_bytes() -> int:
    """Bytes this process has passed to write calls so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar"):
            return int(line.split()[1])
    return 0


def sink_seconds(folder: Path, codec: Codec, batch: list[States], spool: Spool) -> tuple[float, float, float]:
    """Seconds of one commit, bytes written ÷ stored, bytes stored ÷ raw."""
    store = Store.create(folder, SPEC, codec)
    os.sync()
    before, start = written_bytes(), time.perf_counter()
    commit = store.commit_states(batch, spool)
    seconds = time.perf_counter() - start
    assert len(commit.stored) == len(batch), (len(commit.stored), len(commit.lost), len(commit.duplicate))
    written = written_bytes() - before
    segments = folder / "states"
    stored = sum(path.stat().st_size for path in segments.rglob("*") if path.is_file())
    raw = sum(states.spool.size_bytes for states in batch)
    shutil.rmtree(folder)
    return seconds, written / stored, stored / raw


def peak(folder: Path, codec: Codec, rows: int) -> int:
    """Commit one sample of 1.5 GB in a process of its own; its peak memory in MB."""
    spool = Spool(folder / "spool", "bench", 1 << 40)
    (states,) = fill_spool(spool, rows, 1)
    ref = states.spool
    program = (
        "import json, sys; from ops.bench.sink_write import commit_one; commit_one(*json.loads(sys.argv[1]))"
    )
    arguments = json.dumps([str(folder), str(codec), ref.name, ref.shape, ref.crc32])
    out = subprocess.run(
        [sys.executable, "-c", program, arguments], check=True, capture_output=True, text=True
    ).stdout
    spool.delete(ref)
    shutil.rmtree(folder / "store")
    return int(out)


def commit_one(folder: str, codec: str, name: str, shape: list[int], crc32: int) -> None:
    """What the child of `peak` runs."""
    t, layers, hidden = shape
    ref = SpoolRef(node="bench", name=name, shape=(t, layers, hidden), crc32=crc32)
    store = Store.create(Path(folder) / "store", SPEC, Codec(codec))
    spool = Spool(Path(folder) / "spool", "bench", 1 << 40)
    assert store.commit_states([states_of(bytes(16), ref)], spool).stored
    print(peak_kb() // 1024)


def peak_kb() -> int:
    """Peak memory of this process alone, in kB.

    Not `ru_maxrss`: a child that was forked from a big process begins with that one's peak.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Measure each codec and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows only that it runs")
    arguments = parser.parse_args()
    gigabytes, rounds, long_rows = (
        (0.1, 1, 1000) if arguments.quick else (arguments.gigabytes, arguments.rounds, LONG_ROWS)
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        spool = Spool(folder / "spool", "bench", 1 << 40)
        rows = 330
        samples = max(1, int(gigabytes * 1e9 / (rows * LAYERS * HIDDEN * 2)))
        batch = fill_spool(spool, rows, samples)
        size_bytes = sum(states.spool.size_bytes for states in batch)
        raw_seconds(folder / "raw", size_bytes)
        for codec in Codec:
            ratios, written, stored, speeds = [], 0.0, 0.0, []
            for _ in range(rounds):
                raw = raw_seconds(folder / "raw", size_bytes)
                seconds, written, stored = sink_seconds(folder / "store", codec, batch, spool)
                raw = (raw + raw_seconds(folder / "raw", size_bytes)) / 2
                ratios.append(raw / seconds)
                speeds.append((round(size_bytes / raw / 1e6), round(size_bytes / seconds / 1e6)))
            shown = ", ".join(f"{raw}/{sink}" for raw, sink in speeds)
            say(f"sink_write codec={codec} stored/raw={stored:.3f} raw/sink MB/s: {shown}")
            print_rows(
                [
                    Row(
                        what=f"sink write ÷ raw file + fsync, codec {codec}",
                        measured=round(float(np.median(ratios)), 2),
                        at_least=REACH[codec],
                    ),
                    Row(
                        what=f"bytes written ÷ bytes stored, codec {codec}",
                        measured=round(written, 3),
                        at_most=1.05,
                    ),
                    Row(
                        what=f"peak memory, one sample of {long_rows} × {LAYERS} × {HIDDEN}, codec {codec}",
                        measured=peak(folder, codec, long_rows),
                        at_most=600,
                        unit="MB",
                    ),
                ]
            )


if __name__ == "__main__":
    main()
