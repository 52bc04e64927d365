"""The fields of a message: packed small, and read back with every type and size checked.

What each message is made of is in `messages.py`.
"""

import zlib
from typing import Any

from storage.errors import EyasError
from storage.json_records import is_number
from storage.sample import Kind, Span
from storage.tokens import ID_BYTES, Tokens, token_bytes, tokens_from_bytes

MAX_TOKENS = 4_194_304
"""Longest token list a message may carry: 16 MiB of ids."""
MAX_INT32 = 2**31 - 1
"""Counts, places and sizes are stored as int32."""


class MessageError(EyasError):
    """Bytes that are no message of this version: set aside, never run."""


def pack_tokens(tokens: Tokens) -> bytes:
    """Token ids as bytes."""
    return zlib.compress(token_bytes(tokens), 1)


def unpack_tokens(data: bytes) -> Tokens:
    """The inverse: int32 [T], never more than `MAX_TOKENS` whatever the bytes claim."""
    inflater = zlib.decompressobj()
    raw = inflater.decompress(data, MAX_TOKENS * 4)
    if inflater.unconsumed_tail or not inflater.eof:
        raise MessageError(f"token list longer than `{MAX_TOKENS}` or cut short", code="message.size")
    return tokens_from_bytes(raw)


def pack_spans(spans: tuple[Span, ...]) -> list[tuple[int, int, int, str, bool]]:
    """Spans as plain values."""
    return [(s.start, s.end, s.turn, s.kind.value, s.reasoning) for s in spans]


def unpack_spans(rows: list[Any]) -> tuple[Span, ...]:
    """The inverse."""
    return tuple(
        Span(
            start=read_count(start),
            end=read_count(end),
            turn=read_count(turn),
            kind=Kind(kind),
            reasoning=bool(reasoning),
        )
        for start, end, turn, kind, reasoning in rows
    )


def read_id(value: Any) -> bytes:
    """A prompt's id or a digest."""
    if not isinstance(value, bytes) or len(value) != ID_BYTES:
        raise MessageError("an id of other than 16 bytes", code="message.id")
    return value


def read_count(value: Any, below: int = MAX_INT32 + 1) -> int:
    """A whole number from 0."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise MessageError(f"a count expected, `{value!r}` found"[:200], code="message.type")
    return value


def read_seconds(value: Any) -> float:
    """A finite number."""
    if not is_number(value):
        raise MessageError(f"seconds expected, `{value!r}` found"[:200], code="message.type")
    return float(value)


def read_text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise MessageError(f"text expected, `{type(value).__name__}` found", code="message.type")
    return value
