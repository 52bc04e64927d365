"""Several segments written as one: rows are streamed, each byte is written once.

Knows `Table`s, not what the rows mean, nor which segments to merge (`compaction_plan.py`), nor how
the result becomes visible (`compaction.py`). In memory are the small columns, one at a time, and
a few chunks of the flat values. What is read is checked before anybody may delete it: every
chunk's crc32c, and a sample's own checksum where there is one.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.arrays import ArrayFile
from storage.columns import offsets
from storage.errors import DamagedError, EyasError
from storage.segment import COLUMN_CHUNK_BYTES, STATES_CHUNK_BYTES, Segment, Staging
from storage.tables import MERGED_BY, REPLACES, Table

_MALFORMED = (KeyError, IndexError, ValueError, TypeError)
"""What one stumbles over in a segment whose arrays or attributes are not of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some rows of a segment."""

    segment: Segment
    rows: NDArray[np.bool_]
    """Which are taken, bool [N]."""


class UnmergeableError(DamagedError):
    """A segment cannot be read as it must: it stays where it is, for `storage verify` to explain."""

    def __init__(self, segment: Segment, why: str) -> None:
        super().__init__(
            f"`{segment.path}` cannot be merged: {why}",
            code="compact.damaged",
            hint="`storage verify` lists everything that is damaged",
        )
        self.segment = segment


class MergedAwayError(EyasError):
    """Another compaction has merged and deleted a segment meanwhile: look at the folder again."""


@contextmanager
def _reading(segment: Segment) -> Iterator[None]:
    """Say of which segment it is that something cannot be read; what is written has other errors."""
    try:
        yield
    except EyasError as error:
        raise UnmergeableError(segment, error.message) from None
    except OSError as error:
        if not segment.path.exists():
            raise MergedAwayError(f"`{segment.path}` is gone", code="compact.gone") from None
        raise UnmergeableError(segment, f"`{error.filename}`: {error.strerror}") from None
    except _MALFORMED as error:
        raise UnmergeableError(segment, repr(error)) from None


def stage_merged(
    staging: Staging, table: Table, parts: Sequence[Part], node: str, between: Callable[[], None]
) -> None:
    """Write these rows, in this order, into a staging folder, complete and durable.

    `between` is called after every chunk and may raise. Raises `UnmergeableError` naming the
    segment, and `MergedAwayError` when one of them has been deleted.
    """
    for name in table.columns:
        staging.plain(name, np.concatenate([_column(part, name) for part in parts]))
    for name in table.optional:
        staging.plain(name, np.concatenate([_optional(part, name) for part in parts]))
    attributes = dict(parts[0].segment.attributes)
    for name, attribute in table.named.items():
        numbers, attributes[attribute] = _renumbered(parts, name, attribute)
        staging.plain(name, numbers)
    for attribute in table.joined:
        attributes[attribute] = [one for p in parts for one in p.segment.attributes.get(attribute, ())]
    for name, offset_name in table.ragged.items():
        _stream(staging, table, parts, name, offset_name, between)
    replaced = {str(part.segment.name) for part in parts}.union(*(part.segment.replaces for part in parts))
    attributes |= {
        "samples": sum(int(np.count_nonzero(part.rows)) for part in parts),
        # What these have replaced stays named: it keeps their numbers from being given again, and
        # them from reappearing should they still be there when these are deleted.
        REPLACES: sorted(replaced),
        MERGED_BY: node,
    }
    staging.finish(attributes)


def _renumbered(parts: Sequence[Part], name: str, attribute: str) -> tuple[NDArray[np.uint16], list[str]]:
    """A `named` column over all parts, and the names it counts in."""
    places: dict[str, int] = {}
    numbers = []
    for part in parts:
        column = _column(part, name)
        with _reading(part.segment):
            old = part.segment.attributes[attribute]
            new = np.zeros(len(old), np.uint16)
            for number in np.unique(column).tolist():
                new[number] = places.setdefault(str(old[number]), len(places))
            numbers.append(new[column])
    return np.concatenate(numbers), list(places)


def _stream(
    staging: Staging,
    table: Table,
    parts: Sequence[Part],
    name: str,
    offset_name: str,
    between: Callable[[], None],
) -> None:
    spans = [_offsets(part, name, offset_name) for part in parts]
    lengths = np.concatenate([np.diff(span)[part.rows] for span, part in zip(spans, parts, strict=True)])
    staging.plain(offset_name, offsets(lengths))
    first = parts[0].segment.array(name)
    checks = table.crc32[0] if table.crc32 and table.crc32[1] == name else None
    shape = (int(lengths.sum()), *first.shape[1:])
    chunk_bytes = STATES_CHUNK_BYTES if checks else COLUMN_CHUNK_BYTES
    with staging.stream(name, shape, first.dtype, chunk_bytes) as writer:
        for part, span in zip(parts, spans, strict=True):
            for block in _checked(part, name, span, checks):
                writer.append(block)
                between()
        writer.close()


def check_rows(table: Table, part: Part, between: Callable[[], None]) -> None:
    """Read these rows and check them as a merge does; raises as `stage_merged`."""
    for name, offset_name in table.ragged.items():
        checks = table.crc32[0] if table.crc32 and table.crc32[1] == name else None
        for _ in _checked(part, name, _offsets(part, name, offset_name), checks):
            between()


def _checked(
    part: Part, name: str, span: NDArray[np.int64], checks: str | None
) -> Iterator[NDArray[np.generic]]:
    """The flat values of the part's rows, block by block; `checks` is the column of their checksums.

    Run by run, so that a chunk in the middle of one is read once.
    """
    with _reading(part.segment):
        array = part.segment.array(name)
        crc32 = part.segment.column(checks) if checks else None
    for first, last in _runs(part.rows):
        row, found = first, 0
        for begin, block in _blocks(part.segment, array, int(span[first]), int(span[last])):
            yield block
            if crc32 is None:
                continue
            end = begin + len(block)
            while row < last and span[row] < end:
                piece = block[max(0, span[row] - begin) : span[row + 1] - begin]
                found = zlib.crc32(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data, found)
                if span[row + 1] > end:
                    break
                if found != crc32[row]:
                    raise UnmergeableError(part.segment, f"row {row} does not match its checksum")
                row, found = row + 1, 0


def _runs(rows: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The stretches `[first, last)` of rows that are taken."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], rows, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _blocks(
    segment: Segment, array: ArrayFile, begin: int, end: int
) -> Iterator[tuple[int, NDArray[np.generic]]]:
    """Flat rows `[begin, end)` cut where the array's chunks are, each with where it begins."""
    while begin < end:
        stop = min(end, (begin // array.chunk_rows + 1) * array.chunk_rows)
        with _reading(segment):
            block = array.read(begin, stop)
        yield begin, block
        begin = stop


def _column(part: Part, name: str) -> NDArray[np.generic]:
    """The taken rows of one column."""
    with _reading(part.segment):
        column: NDArray[np.generic] = part.segment.column(name)
    if len(column) != len(part.rows):
        raise UnmergeableError(part.segment, f"`{name}` has {len(column)} rows, not {len(part.rows)}")
    return column[part.rows]


def _optional(part: Part, name: str) -> NDArray[np.generic]:
    if (part.segment.path / name / "zarr.json").exists():
        return _column(part, name)
    return np.zeros(int(np.count_nonzero(part.rows)), np.int32)


def _offsets(part: Part, name: str, offset_name: str) -> NDArray[np.int64]:
    """Where each sample's flat values begin, checked: a wrong one would give rows of another."""
    with _reading(part.segment):
        offset: NDArray[np.int64] = part.segment.column(offset_name)
        end = len(part.segment.array(name))
    if (
        len(offset) != len(part.rows) + 1
        or offset[0] != 0
        or offset[-1] != end
        or np.any(offset[1:] < offset[:-1])
    ):
        raise UnmergeableError(part.segment, f"`{offset_name}` does not lead from 0 to {end}")
    return offset
