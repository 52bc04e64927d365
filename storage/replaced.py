"""Segments that a merged one has replaced: which are still there, since when, and deleting them.

They are kept a day for those who read them without looking again, and must be kept longer than
any listing of the folder takes: a listing is no snapshot, and one that missed what came while it
read must not miss what that has replaced too. A segment leaves its folder by one rename, so nobody
ever sees half of one; its files are deleted where nobody looks.
"""

import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from storage.errors import DamagedError
from storage.files import folder_bytes, fsync_folder
from storage.segment import STAGING, Segment, SegmentName, disk_errors, disk_time, list_segments

KEPT_S = 24 * 3600.0
"""How long a replaced segment is kept, seconds since the one that replaced it was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A segment that is still there and does not count any more."""

    segment: SegmentName
    path: Path
    since: float
    """When the first that replaced it was committed, as the file system says: seconds, Unix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """What was deleted."""

    segments: int = 0
    size_bytes: int = 0

    def __add__(self, other: "Deleted") -> "Deleted":
        return Deleted(segments=self.segments + other.segments, size_bytes=self.size_bytes + other.size_bytes)


def replaced(parent: Path) -> list[Replaced]:
    """The replaced segments in this folder that are still there."""
    names = {str(name): name for name in list_segments(parent)}
    since: dict[str, float] = {}
    for name in names.values():
        try:
            segment = Segment(parent, name)
            # Its last file but for what is in the folders; a rename does not change that time.
            at = (segment.path / "zarr.json").stat().st_mtime
        except (DamagedError, FileNotFoundError):
            continue
        for hidden in segment.replaces & names.keys():
            since[hidden] = min(at, since.get(hidden, at))
    return [Replaced(segment=names[name], path=parent / name, since=at) for name, at in sorted(since.items())]


def delete_replaced(
    output: Path, parents: Iterable[Path], kept_s: float = KEPT_S, now: float | None = None
) -> Deleted:
    """Delete what was replaced so long before `now`, by the disk's clock this moment unless given.

    Safe by any number of processes, killed anywhere, while others read and write and `kept_s` is
    longer than a listing takes: the rows are in a segment that is visible, which names all it hides.
    """
    deleted = Deleted()
    with disk_errors(output):
        (output / STAGING).mkdir(exist_ok=True)
        limit = (disk_time(output) if now is None else now) - kept_s
    for parent in parents:
        old = [one for one in replaced(parent) if one.since <= limit]
        if not old:
            continue
        with disk_errors(output):
            fsync_folder(parent)  # what replaced them must not be lost to a power cut after them
            for one in old:
                aside = output / STAGING / f"deleted.{uuid.uuid4().hex}"
                try:
                    size = folder_bytes(one.path)
                    one.path.rename(aside)
                except FileNotFoundError:
                    continue  # somebody else has deleted it
                shutil.rmtree(aside, ignore_errors=True)
                deleted += Deleted(segments=1, size_bytes=size)
    return deleted
