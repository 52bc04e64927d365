"""The segments of one folder merged into fewer: read, written as one, made visible by one rename.

No lock is needed for it to be right. All merged segments of a folder share one sequence of
numbers, and a merge commits only when, at its number, everything it has read and relied upon is
still visible: the rename fails when anybody has merged since that look. So of two that merge
the same, one throws its work away. `only_one` spares them that. What to merge is decided in
`compaction_plan.py`; how rows are copied is in `merge.py`.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.catalog import Catalog
from storage.codec import Codec
from storage.compaction_plan import Candidate
from storage.errors import FullError
from storage.files import folder_bytes
from storage.merge import MergedAwayError, Part, check_rows, stage_merged
from storage.segment import Segment, SegmentName, Staging, disk_errors
from storage.tables import MERGED_BY, table_of

SEQUENCE = "merged"
"""In the place of the node in the name of merged states: no node's own numbers are touched."""
SPARE_BYTES = 256 << 20
"""Free space that a merge leaves: commits are more urgent."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """One merge that was committed."""

    name: str
    replaced: tuple[str, ...]
    """Names of the segments that were read."""
    rows: int
    """Rows written."""
    size_bytes: int
    """Bytes written, as stored."""


class FolderCompaction:
    """One folder of segments: `responses`, `failures` or `states/<capture>`. For one thread."""

    def __init__(
        self,
        output: Path,
        folder: Path,
        codec: Codec,
        *,
        node: str,
        guard: Callable[[], None] = lambda: None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """`guard` is asked before each commit, `between` after each chunk; both may raise."""
        self.folder = folder
        self.kind = folder.relative_to(output).parts[0]
        self._output, self._codec, self._node = output, codec, node
        self._guard, self._between = guard, between
        self._table = table_of(folder, output)
        self._sequence = SEQUENCE if self.kind == "states" else None
        self._known: dict[str, tuple[int, str | None]] = {}
        """Name → bytes and what it is alike to: segments never change."""
        self._catalog = Catalog(folder)

    def look(self) -> dict[str, Segment]:
        """The segments that are visible now, in the order they were first seen."""
        self._catalog.refresh()
        return {str(segment.name): segment for segment in self._catalog.visible()}

    def look_anew(self) -> dict[str, Segment]:
        """The same, forgetting all that was seen: what somebody has taken away is not there then."""
        self._catalog = Catalog(self.folder)
        return self.look()

    def own(self, visible: Mapping[str, Segment]) -> list[str]:
        """Of these, the ones that this node has to tend to: all where no node owns any."""
        if self._sequence is None:
            return list(visible)
        return [
            name
            for name, segment in visible.items()
            if segment.attributes.get(MERGED_BY, segment.name.node) == self._node
        ]

    def size_bytes(self, segment: Segment) -> int:
        """Bytes of its files."""
        return self._facts(segment)[0]

    def candidates(self, segments: Sequence[Segment], dropped: Mapping[str, int]) -> list[Candidate]:
        """What a plan needs to know of them; those of another version or damaged are left out."""
        found = []
        for segment in segments:
            size_bytes, alike = self._facts(segment)
            if alike is not None:
                name = str(segment.name)
                found.append(
                    Candidate(
                        name=name,
                        size_bytes=size_bytes,
                        rows=segment.samples,
                        dropped=dropped.get(name, 0),
                        alike=alike,
                    )
                )
        return found

    def merge(
        self,
        segments: Sequence[Segment],
        kept: Mapping[str, NDArray[np.bool_]],
        relied: Sequence[Part] = (),
    ) -> Merged | None:
        """Merge these into one, of each the rows that `kept` says, all where it says nothing.

        `relied` are rows of other segments that hold what is dropped here: they are read first. None
        when any of all these is not visible any more: look again. Raises `UnmergeableError` naming
        the segment, `FullError`, and what `guard` and `between` raise.
        """
        names = tuple(str(segment.name) for segment in segments)
        needed = {*names, *(str(part.segment.name) for part in relied)}
        self._check_room(sum(map(self.size_bytes, segments)))
        parts = [
            Part(segment=segment, rows=kept.get(name, np.ones(segment.samples, bool)))
            for name, segment in zip(names, segments, strict=True)
        ]
        try:
            for part in relied:
                check_rows(self._table, part, self._between)
        except MergedAwayError:
            return None
        with Staging(self._output, "merge", self._codec, self._guard) as staging:
            try:
                with disk_errors(self._output):
                    stage_merged(staging, self._table, parts, self._node, self._between)
                    size = folder_bytes(staging.path)
            except MergedAwayError:
                return None
            while True:
                if not needed <= self.look().keys():
                    return None
                name = SegmentName(node=self._sequence, seq=self._catalog.last_seq(self._sequence) + 1)
                if staging.commit(self.folder, name):
                    rows = sum(int(np.count_nonzero(part.rows)) for part in parts)
                    return Merged(name=str(name), replaced=names, rows=rows, size_bytes=size)

    def _facts(self, segment: Segment) -> tuple[int, str | None]:
        name = str(segment.name)
        if name not in self._known:
            try:
                self._known[name] = (segment.stored_bytes(), self._table.alike(segment))
            except OSError:
                return (0, None)  # a disk's trouble may pass: asked again with the next look
            except Exception:  # whatever is wrong with it: `verify` says what, here it is left alone
                self._known[name] = (0, None)
        return self._known[name]

    def _check_room(self, needed_bytes: int) -> None:
        with disk_errors(self._output):
            free = shutil.disk_usage(self._output).free
        if free < needed_bytes + min(SPARE_BYTES, needed_bytes):
            raise FullError(
                f"merging `{needed_bytes}` bytes of `{self.folder}` needs as much room beside them; "
                f"`{free}` are free",
                code="compact.full",
                hint=f"free some room there, then run `storage compact {self._output}` again: "
                "nothing was changed by the merge that did not fit",
            )


@contextmanager
def only_one(folder: Path) -> Iterator[bool]:
    """Whether nobody else compacts this folder; nobody does while it lasts.

    The lock is on the folder's own `zarr.json`, which is always there and never replaced, and ends
    with the process that holds it, on whatever machine. A file system without locks says yes
    to all: the work is done twice then, and kept once.
    """
    with disk_errors(folder):
        handle = os.open(folder / "zarr.json", os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield True
    finally:
        os.close(handle)
