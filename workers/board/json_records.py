"""Dataclasses from the JSON they were written as: what is not known is ignored, so versions may differ."""

import types
import typing
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any


def read_record(kind: Any, content: Any) -> Any:
    """`content` as the annotated type `kind`: dataclasses, tuples of one type, enums, plain values.

    Raises `KeyError`, `TypeError` or `ValueError` for content that is not one.
    """
    if is_dataclass(kind):
        types_of = typing.get_type_hints(kind)
        known = {f.name: content[f.name] for f in fields(kind) if f.name in content}
        return typing.cast(Any, kind)(**{name: read_record(types_of[name], v) for name, v in known.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(read_record(arguments[0], each) for each in content)
    if origin in (types.UnionType, typing.Union):
        return None if content is None else read_record(arguments[0], content)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(content)
    return content
