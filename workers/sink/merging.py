"""A sink's small segments merged while it commits: by a thread of its own that lets commits go first.

What is merged with what, and why that loses nothing, is the store's: `storage/upkeep.py`.
"""

import logging
import threading
import time
from collections.abc import Callable

from storage.errors import EyasError
from storage.store import Store
from storage.upkeep import Upkeep
from workers.stopping import StoppedError

logger = logging.getLogger(__name__)

EVERY_S = 30.0
"""Between two looks."""
YIELD_S = 1.0
"""Longest that a chunk waits for a commit: a sink that commits without a pause still merges."""


class Merger:
    """Merges for one sink; `run` is one thread's body, `committing` is set by another."""

    def __init__(self, node: str, stopping: threading.Event) -> None:
        self._node, self._stopping = node, stopping
        self.committing = threading.Event()
        """Set while a commit is under way."""
        self._upkeep: Upkeep | None = None
        self._store: Store | None = None

    def run(self, find_store: Callable[[], Store | None]) -> None:
        """The thread's body: look now and then, while there is a store, until the process ends."""
        while not self._stopping.wait(EVERY_S):
            try:
                store = find_store()
                if store is not None:
                    self.look(store)
            except StoppedError:
                return
            except (OSError, EyasError) as error:
                logger.debug("sink.merge error=%r", error)
            # The edge of the thread: merging is a comfort, and must not end a process.
            except Exception:
                logger.exception("sink.merge failed")

    def look(self, store: Store) -> int:
        """Merge what there is to merge in this store; how many merges. Raises `StoppedError`."""
        if self._upkeep is None or self._store is not store:
            self._store, self._upkeep = store, Upkeep(store, self._node, self._give_way)
        merges = 0
        began = time.monotonic()
        for merged in self._upkeep.look():
            merges += 1
            logger.info(
                "sink.merged segments=%d into=%s rows=%d mb=%.1f s=%.2f",
                len(merged.replaced),
                merged.name,
                merged.rows,
                merged.size_bytes / 1e6,
                time.monotonic() - began,
            )
            began = time.monotonic()
        return merges

    def _give_way(self) -> None:
        """Between two chunks: end with the process, wait while a commit needs disk and cores."""
        deadline = time.monotonic() + YIELD_S
        while not self._stopping.is_set() and self.committing.is_set() and time.monotonic() < deadline:
            self._stopping.wait(0.02)
        if self._stopping.is_set():
            raise StoppedError
