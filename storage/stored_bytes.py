"""How many bytes a store takes on its disk, followed as it grows.

A segment never changes, so each is measured once; one that a compaction has deleted is forgotten.
Only segments count: what lies in `.staging` is not stored yet.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from storage.files import folder_bytes
from storage.segment import list_segments

AT_ONCE_S = 0.2
"""Longest look at new segments: whoever asks has a lease to renew."""


class StoredBytes:
    """The size of one output folder. Not for two threads at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes: dict[Path, int] = {}

    def refresh(self) -> int | None:
        """Bytes of all segments; None while there are some that were not measured yet.

        Each call goes on where the last one stopped for time. Raises `OSError` for a disk's trouble.
        """
        deadline = time.monotonic() + AT_ONCE_S
        there: set[Path] = set()
        complete = True
        for parent in self._parents():
            for name in list_segments(parent):
                segment = parent / str(name)
                there.add(segment)
                if segment in self._sizes:
                    continue
                if time.monotonic() >= deadline:
                    complete = False
                    continue
                self._sizes[segment] = folder_bytes(segment)
        for gone in self._sizes.keys() - there:
            del self._sizes[gone]
        return sum(self._sizes.values()) if complete else None

    def _parents(self) -> Iterator[Path]:
        yield self._path / "responses"
        yield self._path / "failures"
        for kind in ("prompts", "states"):
            try:
                yield from sorted(path for path in (self._path / kind).iterdir() if path.is_dir())
            except FileNotFoundError:
                continue
