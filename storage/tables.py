"""How each kind of segment lies in arrays, for code that moves rows without understanding them.

What the arrays mean is said in `responses.py`, `states.py` and `failures.py`. Prompts are not
here: their order and their attributes say how far a source was read, so they are never merged.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from storage.segment import Segment

REPLACES, MERGED_BY = "replaces", "merged_by"
"""Attributes of a merged segment: the names it hides, and the node that merged it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The arrays of one kind of segment."""

    columns: tuple[str, ...]
    """One row a sample."""
    named: Mapping[str, str]
    """One number a sample → the attribute, a list of names, in which it is a place."""
    ragged: Mapping[str, str]
    """Flat values → their offsets, one a sample and one more."""
    crc32: tuple[str, str] | None = None
    """The column that holds a sample's checksum, and the flat values it is of."""
    joined: tuple[str, ...] = ()
    """Attributes that are lists about some samples: put one after the other."""
    optional: tuple[str, ...] = ()
    """Columns, int32, that older segments lack: 0 there."""

    @property
    def arrays(self) -> frozenset[str]:
        """Names of all arrays."""
        return frozenset((*self.columns, *self.named, *self.ragged, *self.ragged.values()))

    def alike(self, segment: Segment) -> str | None:
        """What segments must have in common to be merged; None for one that is of another version.

        An array that is not known here would be lost, so its segment is left as it is.
        """
        found = {path.parent.name for path in segment.path.glob("*/zarr.json")}
        if found - set(self.optional) != self.arrays:
            return None
        shared = {
            name: value
            for name, value in segment.attributes.items()
            if name not in {"samples", REPLACES, MERGED_BY, *self.named.values(), *self.joined}
        }
        arrays = {name: segment.array(name) for name in self.ragged}
        shapes = {name: [str(array.dtype), *array.shape[1:]] for name, array in arrays.items()}
        return json.dumps([shared, shapes], sort_keys=True)


RESPONSES = Table(
    columns=("id", "digest", "prompt_length", "finish", "counts", "timings"),
    named={"dataset": "datasets", "facts": "facts"},
    ragged={"tokens": "offset", "spans": "span_offset", "text": "text_offset"},
)
STATES = Table(
    columns=("id", "digest", "crc32"),
    named={"facts": "facts"},
    ragged={"states": "offset"},
    crc32=("crc32", "states"),
    joined=("checks",),
)
FAILURES = Table(
    columns=("id", "digest", "stage", "attempts"),
    named={"dataset": "datasets", "capture": "captures", "code": "codes"},
    ragged={"message": "message_offset"},
    optional=("retry",),
)


def table_of(folder: Path, output: Path) -> Table:
    """The table of a folder of segments below `output`: `responses`, `failures`, `states/<capture>`."""
    kinds: dict[str, Table] = {"responses": RESPONSES, "states": STATES, "failures": FAILURES}
    return kinds[folder.relative_to(output).parts[0]]
