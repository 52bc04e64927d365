"""The threads that write states into the spool beside the scheduler's, and what they may keep waiting.

The scheduler never waits for a disk. What waits to be written is memory, so there is a limit to it,
and past that the spool counts as full: that request has no states, a lane then waits and asks again.
How one file is written is in `draft.py`.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from storage.sample import SpoolRef
from storage.spool import Spool
from workers.plugin.budget import Budget
from workers.plugin.draft import Draft

WAITING_BYTES = 4 << 30
"""Most that is held of rows, unless it is a single chunk's: four of the largest prefills of Kimi-K2.5.
Beside it there are only the rows of the batches in flight, and a block for each thread."""
THREADS = 2


class Writer:
    """One scheduler process's threads."""

    def __init__(self, spool: Spool, waiting_bytes: int = WAITING_BYTES) -> None:
        self._spool = spool
        self.budget = Budget(waiting_bytes)
        self.abandoned: deque[Draft] = deque()
        """Files of requests that are gone; whatever forgets a request may append, at any moment."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="eyas-spool")

    def draft(self, *, name: str, columns: Sequence[int], hidden_size: int) -> Draft:
        """A file to be written; nothing is there before its first rows."""
        return Draft(
            self._spool,
            self.budget,
            self._threads.submit,
            name=name,
            columns=columns,
            hidden_size=hidden_size,
        )

    def tidy(self) -> None:
        """Give up the files of requests that are gone."""
        while self.abandoned:
            self.abandoned.popleft().abort()

    def delete(self, ref: SpoolRef) -> None:
        """Remove what nobody will ask for."""
        self._threads.submit(self._spool.delete, ref)

    def close(self) -> None:
        """Finish what was begun."""
        self._threads.shutdown()
