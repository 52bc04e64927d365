"""Dataclasses from JSON that somebody else wrote: every field of its type, or an error.

A file or a message may have been edited, damaged or made up; what comes out of here is what the
dataclass says it is, so that nobody else has to look. What the values mean is their class's.
"""

import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Literal, TypeVar

T = TypeVar("T")

MOST = 2**63
"""Numbers that must be counted with lie below: JSON has no bound, arrays and Redis have."""


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value in this text.

    Raises `ValueError` for all that is not JSON; brackets nested so deep that the parser gives up
    are that too.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_record(kind: type[T], content: Any, *, extra: Literal["refused", "ignored"]) -> T:
    """`content` as the dataclass `kind`, every field checked against its annotation.

    `extra` says what becomes of keys that it does not know: versions that may differ ignore them.
    Raises `ValueError` naming the first field that does not fit; so may the class itself.
    """
    found: T = _dataclass(kind, content, kind.__name__, extra == "ignored")
    return found


def _dataclass(kind: Any, content: Any, where: str, ignoring: bool) -> Any:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} is no object")
    hints = _hints(kind)
    if not ignoring:
        for key in content:
            if key not in hints:
                raise ValueError(f"{where} has no `{key}`"[:200])
    values = {}
    for field in fields(kind):
        if field.name in content:
            values[field.name] = _value(
                hints[field.name], content[field.name], f"{where}.{field.name}", ignoring
            )
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where} lacks `{field.name}`")
    return kind(**values)


def _value(kind: Any, content: Any, where: str, ignoring: bool) -> Any:
    """`content` as an annotated type: a dataclass, a container or choice of such, or a plain value."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    fits = False
    if is_dataclass(kind):
        return _dataclass(kind, content, where, ignoring)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return None if content is None else _value(inner, content, where, ignoring)
    if origin is Literal:
        fits = content in arguments
    elif origin is tuple and isinstance(content, list | tuple):
        each = [arguments[0]] * len(content) if arguments[-1] is ... else arguments
        if len(each) == len(content):
            return tuple(
                _value(one, value, f"{where}[{at}]", ignoring)
                for at, (one, value) in enumerate(zip(each, content, strict=True))
            )
    elif origin is not None and issubclass(origin, Mapping) and isinstance(content, Mapping):
        if all(isinstance(key, str) for key in content):
            return {
                key: _value(arguments[1], value, f"{where}.{key}", ignoring) for key, value in content.items()
            }
    elif kind is Any:
        fits = True
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(content)
    else:
        check = PLAIN.get(kind)
        fits = check is not None and check(content)
    if not fits:
        raise ValueError(f"{where} is `{content!r}`"[:200])
    return content


def is_count(value: Any) -> bool:
    """Whether it is a whole number that can be counted with."""
    return isinstance(value, int) and not isinstance(value, bool) and -MOST <= value < MOST


def is_number(value: Any) -> bool:
    """Whether it is a number that is finite."""
    return is_count(value) or (isinstance(value, float) and math.isfinite(value))


PLAIN: Mapping[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    int: is_count,
    float: is_number,
}


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)
