"""Writes the states of finished requests into the spool, in threads beside the scheduler's.

The scheduler never waits for a disk. What waits to be written is memory, so there is a limit to it,
and past that the spool counts as full: a lane then waits and asks again. Knows no SGLang.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from storage.errors import FullError
from storage.sample import SpoolRef
from storage.spool import Spool
from workers.plugin.rows import Rows

BLOCK_BYTES = 16 << 20
"""Written at once. Each block takes the interpreter's lock a few times from a busy scheduler, up to
5 ms each, so blocks are large."""
WAITING_BYTES = 8 << 30
"""Most that waits to be written, unless it is a single tensor."""


class Writer:
    """Threads that write tensors."""

    def __init__(self, spool: Spool, waiting_bytes: int = WAITING_BYTES) -> None:
        self._spool = spool
        self._limit = waiting_bytes
        self._waiting = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="eyas-spool")

    @property
    def waiting_bytes(self) -> int:
        """Bytes handed over and not written yet."""
        return self._waiting

    def submit(self, rows: Rows, *, name: str, total: int, columns: Sequence[int]) -> "Future[SpoolRef]":
        """Begin to write the first `total` rows, all of them covered; their memory is freed after that.

        The future raises `EyasError`. This raises `FullError` when too much is waiting.
        """
        size = rows.size_bytes
        with self._lock:
            if self._waiting and self._waiting + size > self._limit:
                raise FullError(
                    f"`{self._waiting}` bytes of states wait to be written: the spool is slower than it",
                    code="spool.full",
                )
            self._waiting += size
        return self._threads.submit(self._write, rows, name, total, tuple(columns), size)

    def delete(self, ref: SpoolRef) -> None:
        """Remove what nobody will ask for."""
        self._threads.submit(self._spool.delete, ref)

    def close(self) -> None:
        """Finish what was begun."""
        self._threads.shutdown()

    def _write(self, rows: Rows, name: str, total: int, columns: tuple[int, ...], size: int) -> SpoolRef:
        try:
            hidden = rows.hidden_size
            block_rows = max(1, BLOCK_BYTES // (len(columns) * hidden * 2))
            with self._spool.writer(name, (total, len(columns), hidden)) as writer:
                for block in rows.blocks(total, columns, block_rows):
                    writer.write(block)
                return writer.commit()
        finally:
            rows.clear()
            with self._lock:
                self._waiting -= size
