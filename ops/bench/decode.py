"""Hidden states into the spool, in tokens a second: a stock server's JSON, and the plugin's binary.

JSON by the lanes' decoder process (`workers.sglang.decode`) and, beside it, by orjson, a NumPy array
and the same spool; the binary as the plugin writes it and a lane looks it over. Rows are EAGLE-3's
three layers of one long sample, values of unit variance. Each figure is the median of rounds that
take turns; files are in a temporary folder, in the page cache.

    python -m ops.bench.decode [--quick]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from ops.bench.report import Row, print_rows, say
from storage.spool import Spool, spool_name
from workers.sglang.decode import DecodeJob, bf16_bits
from workers.sglang.decoding import decoder_environ

HS_INDICES = (2, 4, 5)
ID = b"b" * 16


class Decoder:
    """One decoder process, as a lane starts it."""

    def __init__(self, spool: Spool) -> None:
        arguments = [str(spool.folder), spool.node, str(spool.max_bytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers.sglang.decode", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=decoder_environ(),
        )

    def decode(self, job: DecodeJob) -> None:
        """Returns when the states are in the spool."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(job.to_line())
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "reply" not in answer:
            raise RuntimeError(f"the decoder refused: {answer}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def some_states(tokens: int, hidden: int) -> NDArray[np.uint16]:
    """Bits of bf16 at unit variance, uint16 [T, L, H]."""
    values = np.random.default_rng(1).standard_normal((tokens, len(HS_INDICES), hidden))
    return bf16_bits(values)


def reply_of(states: NDArray[np.uint16]) -> bytes:
    """What a stock server replies to a capture of these: the prompt's rows as the one entry."""
    rows = (states.reshape(len(states), -1).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    meta = {
        "id": "bench",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": len(states),
        "completion_tokens": 1,
        "cached_tokens": 0,
        "hidden_states": [rows],
    }
    content = {"text": "", "output_ids": [5], "meta_info": meta}
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def by_orjson(body: Path, spool: Spool, hidden: int) -> None:
    """The plain way: every value a Python float, then an array."""
    rows = np.array(orjson.loads(body.read_bytes())["meta_info"]["hidden_states"][0])
    spool.delete(spool.write(spool_name(ID), bf16_bits(rows).reshape(len(rows), -1, hidden)))


def by_decoder(body: Path, spool: Spool, decoder: Decoder, tokens: int, hidden: int) -> None:
    """The lanes' way."""
    name = spool_name(ID)
    job = DecodeJob(
        body=str(body),
        name=name,
        prompt_tokens=tokens,
        hs_indices=HS_INDICES,
        norm="none",
        hidden_size=hidden,
        chunked_prefill_size=None,
    )
    decoder.decode(job)
    (spool.folder / name).unlink()


def by_spool(states: NDArray[np.uint16], spool: Spool) -> None:
    """The plugin's writing and the lane's look at every value."""
    ref = spool.write(spool_name(ID), states)
    if not spool.check_values(ref).ok:
        raise RuntimeError("the spool holds something else")
    spool.delete(ref)


def seconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small: shows only that it runs")
    quick = parser.parse_args().quick
    tokens, hidden, rounds = (256, 512, 1) if quick else (1024, 4096, 5)
    states = some_states(tokens, hidden)
    with tempfile.TemporaryDirectory() as folder:
        spool, body = Spool(Path(folder) / "spool", "bench", 8 << 30), Path(folder) / "reply.json"
        body.write_bytes(reply_of(states))
        json_bytes = body.stat().st_size / states.size
        decoder = Decoder(spool)
        try:
            ways: dict[str, Callable[[], None]] = {
                "orjson": lambda: by_orjson(body, spool, hidden),
                "decoder": lambda: by_decoder(body, spool, decoder, tokens, hidden),
                "spool": lambda: by_spool(states, spool),
            }
            for work in ways.values():
                work()  # imports and caches
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, work in ways.items():
                    taken[name].append(tokens / seconds(work))
        finally:
            decoder.close()
    speed = {name: statistics.median(rates) for name, rates in taken.items()}
    for name, rates in taken.items():
        say(f"{name} tokens/s: " + ", ".join(f"{rate:.0f}" for rate in rates))
    what = f"3 layers of H {hidden}"
    print_rows(
        [
            Row(
                what=f"JSON, {json_bytes:.1f} bytes a value, {what}", measured=speed["decoder"], unit="tok/s"
            ),
            Row(
                what=f"JSON by the decoder process ÷ by orjson and an array, {what}",
                measured=speed["decoder"] / speed["orjson"],
                at_least=1.0,
            ),
            Row(what=f"binary through the spool, {what}", measured=speed["spool"], unit="tok/s"),
            Row(
                what=f"binary through the spool ÷ JSON by the decoder process, {what}",
                measured=speed["spool"] / speed["decoder"],
            ),
        ]
    )


if __name__ == "__main__":
    main()
