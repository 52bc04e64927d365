"""What a sink does for its store beside committing: merges its own small segments as they come.

Its own are the states of its node; responses and dead letters, which have no node, are everybody's.
Nothing is dropped here: that takes the ids of the whole store, which `storage compact` reads.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from storage.compaction import FolderCompaction, Merged, only_one
from storage.compaction_plan import MANY, TARGET_BYTES, past_many
from storage.errors import FullError
from storage.merge import UnmergeableError
from storage.store import Store

logger = logging.getLogger(__name__)


class Upkeep:
    """One node's upkeep of one store. For one thread; remembers what it has seen of each folder."""

    def __init__(self, store: Store, node: str, between: Callable[[], None] = lambda: None) -> None:
        """`between` is called after every chunk that is copied and may raise."""
        self._store, self._node, self._between = store, node, between
        self._folders: dict[Path, FolderCompaction] = {}
        self._left: set[str] = set()
        """Segments that cannot be merged, `folder/name`."""

    def look(self) -> Iterator[Merged]:
        """Merge what has become many; each merge as it is done.

        A folder that somebody else compacts just now, or a merge for which there is no room, is
        left to the next look. Raises what `between` raises, `RunReplacedError` and
        `UnavailableError`.
        """
        for folder in self._store.segment_folders():
            if folder not in self._folders:
                self._folders[folder] = FolderCompaction(
                    self._store.path,
                    folder,
                    self._store.codec,
                    node=self._node,
                    guard=self._store.check_run,
                    between=self._between,
                )
            compaction = self._folders[folder]
            if len(self._own(compaction)) > MANY:
                with only_one(folder) as alone:
                    if alone:
                        yield from self._merge(compaction)

    def _own(self, compaction: FolderCompaction) -> list[str]:
        visible = compaction.look()
        return [n for n in compaction.own(visible) if f"{compaction.folder}/{n}" not in self._left]

    def _merge(self, compaction: FolderCompaction) -> Iterator[Merged]:
        own = self._own(compaction)
        visible = compaction.look()
        candidates = compaction.candidates([visible[name] for name in own if name in visible], {})
        for group in past_many(candidates, TARGET_BYTES[compaction.kind]):
            try:
                done = compaction.merge([visible[name] for name in group], {})
            except UnmergeableError as error:
                self._left.add(f"{compaction.folder}/{error.segment.name}")
                logger.warning("merge.left error=%r", error.message)
                return
            except FullError as error:
                logger.warning("merge.full error=%r", error.message)
                return
            if done is None:
                compaction.look_anew()
                return
            yield done
