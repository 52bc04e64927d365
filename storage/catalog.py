"""Which segments of one folder are visible, followed as they are committed. Knows no arrays."""

from pathlib import Path

from storage.segment import Segment, SegmentName, list_segments

_ROW_BITS = 32


class Catalog:
    """The segments of one folder in the order they were first seen; never forgets one."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.segments: list[Segment] = []
        """All that were seen, hidden ones too: a place stays good while its files are there."""
        self._seen: set[SegmentName] = set()
        self._hidden: set[str] = set()

    def refresh(self) -> list[int]:
        """Numbers of the segments that became visible since the last call.

        One listing, and one small file for each new segment. A segment that a compaction has
        merged into another is passed over, here or, once seen, by the other's `replaces`.
        """
        while True:
            fresh = [name for name in list_segments(self.parent) if name not in self._seen]
            try:
                segments = [Segment(self.parent, name) for name in fresh]
                break
            except FileNotFoundError:
                continue  # merged and deleted since the listing: list again
        for segment in segments:
            self._hidden |= segment.replaces
        first = len(self.segments)
        self.segments += segments
        self._seen.update(fresh)
        return [first + at for at, name in enumerate(fresh) if str(name) not in self._hidden]

    def visible(self) -> list[Segment]:
        """The segments that count, in the order they were first seen."""
        return [segment for segment in self.segments if str(segment.name) not in self._hidden]

    def last_seq(self, node: str | None = None) -> int:
        """The highest sequence number seen of this node, or of none; 0 when there is none."""
        return max((name.seq for name in self._seen if name.node == node), default=0)


def place(segment: int, row: int = 0) -> int:
    """A segment's number and a row of it as one integer, so that arrays can hold it."""
    return (segment << _ROW_BITS) + row


def placed(value: int) -> tuple[int, int]:
    """The inverse of `place`."""
    return value >> _ROW_BITS, value & ((1 << _ROW_BITS) - 1)
