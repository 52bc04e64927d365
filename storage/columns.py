"""Ragged values as flat arrays: offsets, spans, names as numbers. Knows no files."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.sample import Kind, Span

KINDS = tuple(Kind)
"""A span's kind is its place here: only ever appended to."""
SPAN_COLUMNS = ("start", "end", "turn", "kind", "reasoning")


def offsets(lengths: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Where each of N values begins in their flat array, and its end: int64 [N + 1]."""
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def flat(values: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """The values one after the other, along the first axis."""
    return np.concatenate(values).astype(dtype, copy=False) if values else np.empty(0, dtype)


def ids_array(ids: Sequence[bytes]) -> NDArray[np.uint8]:
    """Ids of 16 bytes as uint8 [N, 16]."""
    return np.frombuffer(b"".join(ids), np.uint8).reshape(len(ids), 16)


def ids_list(array: NDArray[np.uint8]) -> list[bytes]:
    """The inverse of `ids_array`."""
    raw = array.tobytes()
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


def numbered(names: Sequence[str]) -> tuple[list[str], NDArray[np.uint16]]:
    """The distinct names, in the order they come, and the place of each: uint16 [N]."""
    distinct = list(dict.fromkeys(names))
    place = {name: number for number, name in enumerate(distinct)}
    return distinct, np.array([place[name] for name in names], np.uint16)


def spans_array(spans: Sequence[Sequence[Span]]) -> NDArray[np.int32]:
    """All spans of N samples, int32 [S, 5] in the order of `SPAN_COLUMNS`."""
    rows = [
        (span.start, span.end, span.turn, KINDS.index(span.kind), span.reasoning)
        for sample in spans
        for span in sample
    ]
    return np.array(rows, np.int32).reshape(-1, len(SPAN_COLUMNS))


def spans_of(rows: NDArray[np.int32]) -> tuple[Span, ...]:
    """The spans in these rows; the inverse of `spans_array` for one sample."""
    return tuple(
        Span(start=start, end=end, turn=turn, kind=KINDS[kind], reasoning=bool(reasoning))
        for start, end, turn, kind, reasoning in rows.tolist()
    )


def texts_array(texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Offsets and UTF-8 bytes; a lone surrogate, which UTF-8 lacks, becomes `?`."""
    encoded = [text.encode(errors="replace") for text in texts]
    return offsets([len(data) for data in encoded]), np.frombuffer(b"".join(encoded), np.uint8)
