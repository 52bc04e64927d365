"""What somebody might hand to a decoder: any JSON, and what is sound but for one place."""

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from storage.errors import EyasError

DEEP = 5_000
"""Brackets inside each other, far more than a parser written with recursion bears."""

odd_texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "../../etc/passwd",
            "/etc/passwd",
            "a/b",
            ".",
            "..",
            "\0",
            "\ud800",
            "s-../../x-00000001",
            "a" * 300,
        ]
    ),
)
odd_numbers = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63, -(2**63) - 1, 10**30]),
    st.floats(allow_nan=True, allow_infinity=True),
)
leaves = st.one_of(st.none(), st.booleans(), odd_numbers, odd_texts)
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
"""Any value that JSON can say."""


def deep(depth: int = DEEP) -> bytes:
    """Sound JSON that is nested too deep."""
    return b"[" * depth + b"]" * depth


@st.composite
def spoiled(draw: Callable[..., Any], sound: Any) -> Any:
    """`sound` with one to three places replaced, taken away or added."""
    content = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        content = _spoil(draw, content)
    return content


def _spoil(draw: Callable[..., Any], content: Any) -> Any:
    inside = (
        list(content)
        if isinstance(content, dict)
        else list(range(len(content)))
        if isinstance(content, list)
        else []
    )
    if not inside or draw(st.integers(0, 4)) == 0:
        return draw(values)
    key = draw(st.sampled_from(inside))
    match draw(st.sampled_from(["deeper", "deeper", "deeper", "gone", "more"])):
        case "deeper":
            content[key] = _spoil(draw, content[key])
        case "gone":
            del content[key]
        case "more" if isinstance(content, dict):
            content[draw(st.text(max_size=8))] = draw(values)
        case "more":
            content.append(draw(values))
    return content


@st.composite
def spoiled_bytes(draw: Callable[..., Any], sound: bytes) -> bytes:
    """`sound` cut short, with bytes changed, or any bytes at all."""
    match draw(st.sampled_from(["cut", "changed", "any"])):
        case "cut":
            return sound[: draw(st.integers(0, len(sound)))]
        case "changed":
            changed = bytearray(sound)
            for _ in range(draw(st.integers(1, 4))):
                changed[draw(st.integers(0, len(sound) - 1))] = draw(st.integers(0, 255))
            return bytes(changed)
        case _:
            return draw(st.binary(max_size=200))


def texts(sound: Any) -> st.SearchStrategy[bytes]:
    """JSON texts: any value, `sound` spoiled as a value or as bytes, and one that is too deep."""
    return st.one_of(
        spoiled(sound).map(as_text),
        values.map(as_text),
        spoiled_bytes(as_text(sound)),
        st.just(deep()),
    )


def as_text(value: Any) -> bytes:
    """JSON with everything that Python's parser takes: NaN, lone halves of a pair."""
    return json.dumps(value).encode()


def given_or_refused(decode: Callable[[], Any], *also: type[BaseException]) -> Any:
    """What the decoder gives, or None for an error of ours (or one of `also`, which it promises)."""
    try:
        return decode()
    except (EyasError, *also):
        return None


def plain(value: Any) -> Any:
    """Comparable: arrays as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "__slots__"):
        return type(value).__name__, [plain(getattr(value, name)) for name in value.__slots__]
    return value
