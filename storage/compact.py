"""`storage compact`: every folder of a store merged into as few segments as its size is worth.

Responses first, then states, then failures, which those may have made good. What is done in one
folder is in `compaction.py`; what may be dropped, in `droppable.py`; deleting what was replaced
long enough ago, in `replaced.py`. Killed at any moment it has lost nothing: run it again.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from storage.compaction import FolderCompaction, only_one
from storage.compaction_plan import TARGET_BYTES, worth_merging
from storage.droppable import Droppable, failures_made_good, repeated_states
from storage.errors import DamagedError, UnavailableError
from storage.files import folder_bytes
from storage.merge import Part, UnmergeableError
from storage.progress import Progress
from storage.replaced import KEPT_S, Deleted, delete_replaced, replaced
from storage.segment import Segment
from storage.store import Store

WAIT_S = 5.0
"""How long another compaction of a folder is waited for."""
NODE = "compact"
"""Who merged, in the attributes of a segment: no node, so that no sink tends to it again."""


@dataclass(slots=True, kw_only=True)
class FolderReport:
    """What was done in one folder."""

    folder: str
    """Below the store: `responses`, `states/eagle3`, …"""
    segments_before: int
    segments_after: int = 0
    """Segments that count."""
    bytes_before: int
    bytes_after: int = 0
    """Of the segments that count, as stored."""
    merged: int = 0
    """Segments that were merged into others."""
    written_bytes: int = 0
    repeated_states: int = 0
    """States that were stored twice, dropped."""
    made_good: int = 0
    """Failures that a response or states have made good, dropped."""
    left: list[str] = field(default_factory=list)
    """Segments that cannot be merged, and why: they stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactReport:
    """What a compaction did."""

    path: str
    folders: tuple[FolderReport, ...]
    deleted_segments: int
    deleted_bytes: int
    waiting_segments: int
    """Replaced, and kept for those who still read them."""
    waiting_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As `storage compact --json` prints it."""
        return asdict(self)


def compact(
    path: Path,
    progress: Progress,
    *,
    kept_s: float = KEPT_S,
    clock: Callable[[], float | None] = lambda: None,
) -> CompactReport:
    """Compact a store while others read and write it.

    `kept_s` is how long what was replaced is kept, seconds; by the disk's own clock where `clock`
    tells no time. Raises `UnavailableError` when there
    is no run or another compaction is at work, and `FullError` when a merge does not fit.
    """
    store = Store.open(path)
    folders = store.segment_folders()
    reports, deleted = [], Deleted()
    for folder in folders:
        with _alone(folder, progress):
            deleted += delete_replaced(path, [folder], kept_s, clock())
            reports.append(_Folder(store, folder, progress).compact())
            deleted += delete_replaced(path, [folder], kept_s, clock())
    waiting = [one for folder in folders for one in replaced(folder)]
    return CompactReport(
        path=str(path),
        folders=tuple(reports),
        deleted_segments=deleted.segments,
        deleted_bytes=deleted.size_bytes,
        waiting_segments=len(waiting),
        waiting_bytes=sum(folder_bytes(one.path) for one in waiting),
    )


@contextmanager
def _alone(folder: Path, progress: Progress) -> Iterator[None]:
    """As the only one that compacts this folder; a sink's own merge is waited for a while."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with only_one(folder) as alone:
            if alone:
                yield
                return
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"`{folder}` is being compacted by another process",
                code="compact.busy",
                hint="let it end, or stop it, which loses nothing; then run this again",
            )
        progress.say(folder=folder.name, waiting="another-compaction")
        time.sleep(0.1)


class _Folder:
    """One folder, until there is nothing more to do in it."""

    def __init__(self, store: Store, folder: Path, progress: Progress) -> None:
        self._store = store
        self._name = str(folder.relative_to(store.path))
        self._progress = progress
        self._left: dict[str, str] = {}
        self._read = 0
        self._compaction = FolderCompaction(
            store.path, folder, store.codec, node=NODE, guard=store.check_run, between=self._say
        )
        visible = self._compaction.look()
        self._report = FolderReport(
            folder=self._name, segments_before=len(visible), bytes_before=self._bytes(visible)
        )

    def compact(self) -> FolderReport:
        """Plan and merge, again while others have changed what was planned."""
        while not self._pass():
            pass
        visible = self._compaction.look()
        self._report.segments_after, self._report.bytes_after = len(visible), self._bytes(visible)
        self._report.left = [f"{self._name}/{name}: {why}" for name, why in sorted(self._left.items())]
        return self._report

    def _pass(self) -> bool:
        """Whether everything that was planned has been done."""
        compaction = self._compaction
        self._store.check_run()
        visible = {n: s for n, s in compaction.look_anew().items() if n not in self._left}
        droppable = self._droppable(visible)
        if droppable is None:
            return False
        candidates = compaction.candidates(list(visible.values()), droppable.counts)
        groups = worth_merging(candidates, TARGET_BYTES[compaction.kind])
        moved: set[str] = set()
        for group in groups:
            relied = _relied(droppable, group, visible)
            if moved & {str(part.segment.name) for part in relied}:
                return False  # what it relies on has just been merged: plan again
            try:
                done = compaction.merge([visible[name] for name in group], droppable.kept, relied)
            except UnmergeableError as error:
                self._left[str(error.segment.name)] = error.message
                return False
            if done is None:
                return False
            moved.update(group)
            dropped = sum(droppable.counts.get(name, 0) for name in group)
            self._report.merged += len(group)
            self._report.written_bytes += done.size_bytes
            if compaction.kind == "states":
                self._report.repeated_states += dropped
            else:
                self._report.made_good += dropped
        return True

    def _droppable(self, visible: dict[str, Segment]) -> Droppable | None:
        """None when a segment turned out damaged or gone: look again."""
        for name, segment in visible.items():
            try:
                segment.ids("id"), segment.ids("digest")
            except FileNotFoundError:
                if segment.path.exists():
                    self._left[name] = "a file of it is gone"
                return None
            except (DamagedError, OSError) as error:
                self._left[name] = str(error)
                return None
        try:
            if self._compaction.kind == "states":
                sizes = {name: self._compaction.size_bytes(s) for name, s in visible.items()}
                return repeated_states(visible, sizes)
            if self._compaction.kind == "failures":
                return failures_made_good(self._store.path, visible)
        except FileNotFoundError:
            return None
        except DamagedError:
            pass  # a response or states that cannot be read have made nothing good
        return Droppable()

    def _bytes(self, visible: dict[str, Segment]) -> int:
        return sum(map(self._compaction.size_bytes, visible.values()))

    def _say(self) -> None:
        self._read += 1
        self._progress.say(
            folder=self._name,
            merged=self._report.merged,
            chunks=self._read,
            gb=round(self._report.written_bytes / 1e9, 2),
        )


def _relied(droppable: Droppable, group: tuple[str, ...], visible: dict[str, Segment]) -> list[Part]:
    """The rows of segments outside the group that hold what it may lose."""
    found: dict[str, Part] = {}
    for name in group:
        for holder, rows in droppable.relied.get(name, {}).items():
            if holder not in group:
                before = found[holder].rows if holder in found else False
                found[holder] = Part(segment=visible[holder], rows=rows | before)
    return list(found.values())
