"""The process that turns a stock server's JSON into a spool file: `python -m workers.sglang.decode`.

A parser of JSON holds the interpreter's lock for as long as it runs, so that a lane which decoded
its own replies would keep half of its calls waiting. Jobs are lines of JSON on stdin, results
lines on stdout; the process ends with its stdin, so a killed lane leaves none behind. Who starts
it and talks to it is `decoding.py`.
"""

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simdjson
from numpy.typing import NDArray

from storage.errors import EyasError, FullError
from storage.json_records import parse_json, read_record
from storage.spool import Spool, check_values
from workers.sglang.checks import check_values as refuse_values
from workers.sglang.checks import why_short
from workers.sglang.outcomes import CallError

BLOCK_BYTES = 8 << 20
"""Rows are converted and written in blocks of about so many bytes of float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """One reply to decode."""

    body: str
    """Path of the reply as it came."""
    name: str
    """Name of the spool file to write."""
    prompt_tokens: int
    """Ids that were sent."""
    hs_indices: tuple[int, ...]
    """What the rows are, for the reference to them: L layers in one row."""
    norm: str
    hidden_size: int
    """H: a row of the reply holds L·H values."""
    chunked_prefill_size: int | None
    """Of the server, for the likely cause of missing rows."""

    def to_line(self) -> bytes:
        """As it goes to the process."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "DecodeJob":
        """The inverse of `to_line`; raises `ValueError`."""
        return read_record(cls, parse_json(line), extra="refused")


def decode(job: DecodeJob, spool: Spool) -> dict[str, Any]:
    """The reply without its hidden states, and `meta_info.eyas_states` saying where these lie now.

    That is what a server with the plugin replies. Raises `CallError` when the rows are not what
    was asked for, `FullError` when the spool has no room.
    """
    try:
        # `load` is csimdjson's own reading: the text is never a Python object.
        document: Any = simdjson.Parser().load(job.body)
    except (ValueError, OSError, RuntimeError) as error:
        raise _unreadable(Path(job.body), error) from None
    try:
        # Its `items()` would make a Python float of every value.
        said = document["meta_info"]
        meta = {key: _plain(said[key]) for key in said.keys() if key != "hidden_states"}  # noqa: SIM118
        reply = {
            "text": document["text"],
            "output_ids": document["output_ids"].as_list(),
            "meta_info": meta,
        }
        if meta["finish_reason"]["type"] == "abort":
            return reply
        entries = said.get("hidden_states")
        if entries is None:
            raise CallError("the reply has no hidden states", code="states.missing")
        meta["eyas_states"] = _spool(entries, job, spool, reply, meta)
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration, RuntimeError) as error:
        # RuntimeError is simdjson's own, and what an iteration that ends inside a generator becomes.
        raise CallError(f"the reply is not `/generate`'s: {error!r}"[:300], code="reply.garbage") from None
    return reply


def _spool(
    entries: Any, job: DecodeJob, spool: Spool, reply: dict[str, Any], meta: dict[str, Any]
) -> dict[str, Any]:
    layers, width = len(job.hs_indices), len(job.hs_indices) * job.hidden_size
    produced = len(reply["output_ids"])
    if len(entries) != produced:
        raise CallError(f"states for {len(entries)} of {produced} output tokens", code="states.short")
    prefilled = len(next(iter(entries)))
    if prefilled != job.prompt_tokens:
        cause = why_short(
            prefilled,
            job.prompt_tokens,
            cached_tokens=int(meta.get("cached_tokens") or 0),
            chunked_prefill_size=job.chunked_prefill_size,
        )
        raise CallError(cause, code="states.short")
    shape = (job.prompt_tokens + produced - 1, layers, job.hidden_size)
    with spool.writer(job.name, shape) as writer:
        for values in _blocks(token_rows(entries), width):
            states = bf16_bits(values).reshape(-1, layers, job.hidden_size)
            refuse_values(check_values(states))
            writer.write(states)
        ref = writer.commit()
    return {
        "node": ref.node,
        "name": ref.name,
        "shape": ref.shape,
        "crc32": ref.crc32,
        "hs_indices": job.hs_indices,
        "norm": job.norm,
    }


def token_rows(entries: Any) -> Iterator[Any]:
    """Each token's row, in order, from a reply's `hidden_states`.

    Entry 0 is the prompt's block, entry k ≥ 1 the row of generated token k − 1. A request that was
    retracted is prefilled again up to there, and entry k is then that prefill's block (all of it,
    or less with a prefix cache): its last row is the entry's own, the others are repeated.
    """
    for number, entry in enumerate(entries):
        if number == 0:
            yield from entry
        elif isinstance(next(iter(entry), None), float | int):
            yield entry
        else:
            *_, last = entry
            yield last


def bf16_bits(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """The bits of the nearest bf16, ties to even; exact for values that came from bf16.

    What is too large for bf16 becomes infinite, which the check of values refuses.
    """
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    half_less_one_or_half = np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return ((bits + half_less_one_or_half) >> 16).astype(np.uint16)


def _blocks(rows: Iterator[Any], width: int) -> Iterator[NDArray[np.float64]]:
    """The rows in blocks, float64 [t, width]; each block is overwritten by the next."""
    block = np.empty((max(1, BLOCK_BYTES // (8 * width)), width))
    filled = 0
    for row in rows:
        try:
            values = np.frombuffer(row.as_buffer(of_type="d"))
        except TypeError:  # null is how some encoders write NaN
            raise CallError(
                "a hidden state holds something that is not a number", code="states.not_finite"
            ) from None
        if len(values) != width:
            raise CallError(f"a row holds {len(values)} values, asked were {width}", code="states.shape")
        block[filled] = values
        filled += 1
        if filled == len(block):
            yield block
            filled = 0
    if filled:
        yield block[:filled]


def _plain(value: Any) -> Any:
    if isinstance(value, simdjson.Object):
        return value.as_dict()
    return value.as_list() if isinstance(value, simdjson.Array) else value


def _unreadable(body: Path, error: Exception) -> CallError:
    """NaN and Infinity are not JSON: the parser refuses the whole reply, and only a look tells why."""
    try:
        with body.open("rb") as file:
            before = b""
            while chunk := file.read(1 << 20):
                if b"NaN" in (text := before + chunk) or b"Infinity" in text:
                    return CallError("hidden states that are not finite", code="states.not_finite")
                before = chunk[-8:]
    except OSError:
        pass
    return CallError(f"the reply is not JSON: {error}"[:300], code="reply.garbage")


def main() -> None:
    """Decode jobs until stdin ends: arguments are the spool's folder, node and size in bytes."""
    # Ctrl-C in a terminal reaches the whole group; the lane decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, node, max_bytes = sys.argv[1:]
    spool = Spool(Path(folder), node, int(max_bytes))
    for line in sys.stdin.buffer:
        job = DecodeJob.from_line(line)
        result: dict[str, Any]
        try:
            result = {"reply": decode(job, spool)}
        except CallError as error:
            result = {"refused": error.code, "message": error.message}
        except FullError as error:
            result = {"full": error.code, "message": error.message}
        except EyasError as error:
            result = {"refused": "states.lost", "message": error.message}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
