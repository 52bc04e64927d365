"""Which segments of one folder are visible and which ids they hold, followed as they are committed."""

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.errors import DamagedError
from storage.idtable import ABSENT, IdTable
from storage.segment import Segment, SegmentName, list_segments

_ROW_BITS = 32
_GAPS = 1000
"""Most numbers that a listing may have left out: what lacks more has lost them."""


class Catalog:
    """The segments of one folder in the order they were first seen; never forgets one."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.segments: list[Segment] = []
        """All that were seen, hidden ones too: a place stays good while its files are there."""
        self._seen: set[str] = set()
        self._last: dict[str | None, int] = {}
        self._hidden: set[str] = set()
        self._read = 0

    def refresh(self) -> list[int]:
        """Numbers of the segments that became visible since the last call.

        One listing, and one small file for each new segment. A segment that a compaction has
        merged into another is passed over, here or, once seen, by the other's `replaces`.
        """
        fresh, segments = self._listed()
        for segment in segments:
            self._hidden |= segment.replaces
        first = len(self.segments)
        self.segments += segments
        self._seen.update(map(str, fresh))
        # Numbers that a compaction has freed are not given again, even when a node's last is gone.
        for name in [*fresh, *(name for segment in segments for name in _replaced(segment))]:
            self._last[name.node] = max(self._last.get(name.node, 0), name.seq)
        return [first + at for at, name in enumerate(fresh) if str(name) not in self._hidden]

    def _listed(self) -> tuple[list[SegmentName], list[Segment]]:
        """The segments that were not seen yet.

        A listing is no snapshot: it may show a segment and not the one that was committed before
        it. A number that is left out is looked for once more; then it was taken away.
        """
        missing: set[SegmentName] = set()
        while True:
            fresh = list_segments(self.parent, but=self._seen)
            try:
                segments = [Segment(self.parent, name) for name in fresh]
            except FileNotFoundError:
                continue  # merged and deleted since the listing: list again
            before, missing = missing, self._left_out(fresh, segments)
            if missing <= before:
                return fresh, segments

    def _left_out(self, fresh: list[SegmentName], segments: list[Segment]) -> set[SegmentName]:
        """Names that should be there: numbers are given one after the other."""
        numbers: dict[str | None, set[int]] = {}
        for name in [*fresh, *(name for segment in segments for name in _replaced(segment))]:
            numbers.setdefault(name.node, set()).add(name.seq)
        missing: set[SegmentName] = set()
        for node, found in numbers.items():
            last, new = self._last.get(node, 0), {seq for seq in found if seq > self._last.get(node, 0)}
            if new and max(new) - last - len(new) <= _GAPS:
                missing |= {SegmentName(node=node, seq=seq) for seq in set(range(last + 1, max(new))) - new}
        return missing

    def read_new(self, read: Callable[[int, Segment], None]) -> None:
        """Refresh, and hand each visible segment that was not read yet to `read`, with its number.

        A segment counts as read when `read` has returned: after an error the next call begins
        with that segment again, so that a moment's trouble with the disk leaves no gap in what
        is known to be stored. Use this or what `refresh` returns, not both.
        """
        self.refresh()
        while self._read < len(self.segments):
            segment = self.segments[self._read]
            try:
                if str(segment.name) not in self._hidden:
                    read(self._read, segment)
            except FileNotFoundError as error:
                self.refresh()  # merged and deleted since: the merged one is behind us in the list
                if str(segment.name) not in self._hidden:
                    raise DamagedError(f"`{error.filename}` is gone", code="file.missing") from None
            self._read += 1

    def visible(self) -> list[Segment]:
        """The segments that count, in the order they were first seen."""
        return [segment for segment in self.segments if str(segment.name) not in self._hidden]

    def is_hidden(self, name: SegmentName) -> bool:
        """Whether a merged segment that was seen has replaced the one of this name."""
        return str(name) in self._hidden

    def last_seq(self, node: str | None = None) -> int:
        """The highest sequence number seen of this node, or of none; 0 when there is none."""
        return self._last.get(node, 0)


class PlacedIds:
    """Where each id of a catalog's segments lies. Not for two threads at once.

    An id is the xor of the columns named: `id` alone, or `id` and `digest`.
    """

    def __init__(self, catalog: Catalog, columns: Sequence[str]) -> None:
        self.catalog = catalog
        self._columns = columns
        self._places = IdTable()

    def refresh(self) -> None:
        """Enter the rows of segments that are new; the first place of an id stays.

        A merged segment takes over the places of those it replaces.
        """
        self.catalog.read_new(self._enter)

    def _enter(self, number: int, segment: Segment) -> None:
        keys = reduce(np.bitwise_xor, [segment.ids(name) for name in self._columns])
        places = place(number) + np.arange(len(keys), dtype=np.int64)
        self._places.add(keys, places)
        if segment.replaces:
            self._places.replace(keys, places)

    def find(self, keys: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The place of each of uint8 [N, 16], `ABSENT` where there is none."""
        return self._places.find(keys)

    def known(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which of uint8 [N, 16] have a place."""
        known: NDArray[np.bool_] = self.find(keys) != ABSENT
        return known


def _replaced(segment: Segment) -> list[SegmentName]:
    return [name for name in map(SegmentName.parse, segment.replaces) if name]


def place(segment: int, row: int = 0) -> int:
    """A segment's number and a row of it as one integer, so that arrays can hold it."""
    return (segment << _ROW_BITS) + row


def placed(value: int) -> tuple[int, int]:
    """The inverse of `place`."""
    return value >> _ROW_BITS, value & ((1 << _ROW_BITS) - 1)
