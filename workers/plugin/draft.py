"""One request's spool file while its rows still come: each is written at its position as soon as it can be.

The scheduler's thread hands rows over and goes on; threads of the `Writer` write them, those of one file
in the order they came, so that what comes again after a retraction replaces what was. No page of the file
is mapped: a full disk is an error of the write, not a SIGBUS. Knows no SGLang.
"""

import os
import secrets
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import numpy as np

from storage.errors import EyasError, FullError, UnavailableError
from storage.sample import SpoolRef
from storage.spool import Spool
from storage.spool_file import HEADER_BYTES, file_bytes, header, spool_error
from workers.plugin.budget import Budget
from workers.plugin.rows import Bits, Coverage, Part

What = TypeVar("What")
GATHERED_BYTES = 2 << 20
"""Rows of decoding that are written together: 36 of a model of H = 7168 with four layers."""
GATHERED_ROWS = 256
"""Most of a small model's."""
BLOCK_BYTES = 16 << 20
"""Written at once. Each block takes the interpreter's lock a few times from a busy scheduler, up to
5 ms each, so blocks are large."""


class Draft:
    """A file [T, L, H] whose T is known at its end. `put…`, `finish` and `abort` are one thread's."""

    def __init__(
        self,
        spool: Spool,
        budget: Budget,
        submit: Callable[[Callable[[], None]], object],
        *,
        name: str,
        columns: Sequence[int],
        hidden_size: int,
    ) -> None:
        """`columns` are places among what the model gives; `submit` runs in some thread, soon."""
        self._spool, self._budget, self._submit = spool, budget, submit
        self._name, self._columns = name, tuple(columns)
        self._row = (len(self._columns), hidden_size)
        self._row_bytes = 2 * len(self._columns) * hidden_size
        self.covered = Coverage()
        self._growing: Part | None = None
        """Rows of decoding that are gathered."""
        self._lock = threading.Lock()
        self._queue: deque[Part | tuple[int, Future[SpoolRef]] | None] = deque()
        """Rows to write; the total that ends the file; None to give it up."""
        self._busy = False
        """Whether a thread works on the queue."""
        self._failed: EyasError | None = None
        self._closed = False
        """Whether the file is whole, or given up."""
        # Below: of the thread that works on the queue.
        self._handle: int | None = None
        self._temporary = spool.folder / f".{name}.{secrets.token_hex(4)}.part"
        self._size = 0
        self._crc32 = 0
        self._summed = 0
        """Rows from the first that `_crc32` is of; -1 when some of them were replaced."""

    def put(self, part: Part) -> None:
        """Have the rows written; nobody else may write to them.

        Raises `FullError` when too much waits, and what an earlier write raised.
        """
        self._seal()
        self._hold(part.size_bytes)
        self._hand_over(part)
        self.covered.add(part.start, part.stop)

    def put_row(self, position: int, aux: Bits | None, final: Bits) -> None:
        """Copy one row, aux [K · H] and final [H], to be written with its neighbours.

        Raises as `put` does.
        """
        part = self._growing
        if part is None or part.stop != position:
            self._seal()
            row_bytes = final.nbytes + (0 if aux is None else aux.nbytes)
            rows = 1 if self._budget.tight else max(1, min(GATHERED_ROWS, GATHERED_BYTES // row_bytes))
            self._hold(rows * row_bytes)
            part = Part(
                start=position,
                count=0,
                aux=None if aux is None else np.empty((rows, len(aux)), np.uint16),
                final=np.empty((rows, len(final)), np.uint16),
            )
            self._growing = part
        part.final[part.count] = final
        if part.aux is not None and aux is not None:
            part.aux[part.count] = aux
        part.count += 1
        self.covered.add(position, position + 1)
        if part.count == len(part.final):
            self._seal()

    def finish(self, total: int) -> "Future[SpoolRef]":
        """End the file with its first `total` rows, all of them covered; the future raises `EyasError`."""
        self._seal()
        future: Future[SpoolRef] = Future()
        self._hand_over((total, future))
        return future

    def abort(self) -> None:
        """Give the file up, and the memory back; nothing happens when it is finished."""
        error = UnavailableError("the request was aborted", code="states.aborted")
        growing, self._growing = self._growing, None
        if growing is not None:
            self._budget.give_back(growing.size_bytes)
        with self._lock:
            if self._closed:
                return
            dropped, self._queue = self._queue, deque()
            self._failed = self._failed or error
        for item in dropped:
            if isinstance(item, Part):
                self._budget.give_back(item.size_bytes)
            elif item is not None:
                item[1].set_exception(error)
        self._queue_up(None)

    def _seal(self) -> None:
        """Hand over what is gathered."""
        part, self._growing = self._growing, None
        if part is not None:
            self._hand_over(part)

    def _hold(self, size_bytes: int) -> None:
        """Count memory of rows; raises `FullError` when that is too much."""
        if self._failed is not None:
            raise self._failed
        self._budget.take(size_bytes)

    def _hand_over(self, item: Part | tuple[int, "Future[SpoolRef]"]) -> None:
        if self._failed is not None:
            if isinstance(item, Part):
                self._budget.give_back(item.size_bytes)
            raise self._failed
        self._queue_up(item)

    def _queue_up(self, item: Part | tuple[int, "Future[SpoolRef]"] | None) -> None:
        with self._lock:
            self._queue.append(item)
            begin, self._busy = not self._busy, True
        if begin:
            self._submit(self._work)

    def _work(self) -> None:
        """Take from the queue until it is empty; one thread at a time."""
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    return
                item = self._queue.popleft()
            if item is None:
                self._give_up()
            elif isinstance(item, Part):
                self._attempt(self._write, item)
                self._budget.give_back(item.size_bytes)
            else:
                total, future = item
                ref = self._attempt(self._commit, total)
                if ref is not None:
                    future.set_result(ref)
                else:
                    assert self._failed is not None
                    future.set_exception(self._failed)

    def _attempt(self, work: Callable[[What], SpoolRef | None], what: What) -> SpoolRef | None:
        """What the work returns; a failure is kept, and there is no file any more."""
        if self._failed is None:
            try:
                return work(what)
            except EyasError as error:
                self._failed = error
            except OSError as error:
                self._failed = spool_error(self._spool.folder, error)
            except Exception as error:  # the edge of the thread: a reply waits for the future
                self._failed = EyasError(f"the plugin failed: {error!r}"[:300], code="plugin.failed")
            # A traceback keeps every array of the frames it went through.
            self._failed.__traceback__ = self._failed.__context__ = None
            self._give_up()
        return None

    def _write(self, part: Part) -> None:
        self._reserve(part.stop)
        assert self._handle is not None
        block_rows = max(1, BLOCK_BYTES // self._row_bytes)
        buffer = np.empty((min(part.count, block_rows), *self._row), np.uint16)
        for first in range(0, part.count, block_rows):
            block = buffer[: min(block_rows, part.count - first)]
            part.fill(block, first, self._columns)
            position = part.start + first
            data = block.reshape(-1).view(np.uint8).data
            self._sum(position, len(block), data)
            offset = HEADER_BYTES + position * self._row_bytes
            while data:
                written = os.pwrite(self._handle, data, offset)
                data, offset = data[written:], offset + written

    def _reserve(self, rows: int) -> None:
        """Make the file as long as so many rows, in growing steps: each looks at the whole spool."""
        needed = file_bytes((rows, *self._row))
        if needed <= self._size:
            return
        size = max(needed, self._size + self._size // 2)
        try:
            self._spool.check_room(size, size - self._size)
        except FullError:
            size = needed
            self._spool.check_room(size, size - self._size)
        if self._handle is None:
            self._temporary.parent.mkdir(mode=0o700, exist_ok=True)  # whatever cleans /tmp may have taken it
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._handle = os.open(self._temporary, flags, 0o600)
        os.ftruncate(self._handle, size)
        self._size = size

    def _sum(self, position: int, rows: int, data: memoryview) -> None:
        """Go on with the checksum, as long as rows come in order."""
        if position in (0, self._summed):
            self._crc32 = zlib.crc32(data, self._crc32 if position else 0)
            self._summed = position + rows
        elif position < self._summed:
            self._summed = -1

    def _commit(self, total: int) -> SpoolRef:
        assert self._handle is not None
        shape = (total, *self._row)
        crc32 = self._crc32 if self._summed == total else self._read_sum(total)
        os.ftruncate(self._handle, file_bytes(shape))
        os.pwrite(self._handle, header(shape, crc32), 0)
        os.close(self._handle)
        self._handle = None
        self._temporary.rename(self._spool.folder / self._name)
        self._closed = True
        return SpoolRef(node=self._spool.node, name=self._name, shape=shape, crc32=crc32)

    def _read_sum(self, total: int) -> int:
        """The checksum of what is in the file, after rows came out of order: a retraction."""
        assert self._handle is not None
        crc32, offset, left = 0, HEADER_BYTES, total * self._row_bytes
        while left:
            data = os.pread(self._handle, min(left, BLOCK_BYTES), offset)
            if not data:
                raise UnavailableError(f"spool file `{self._name}` ends early", code="spool.lost")
            crc32 = zlib.crc32(data, crc32)
            offset, left = offset + len(data), left - len(data)
        return crc32

    def _give_up(self) -> None:
        self._closed = True
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):  # what could not be written is said of it again; the reply must not wait
                os.close(handle)
        if self._size:
            with suppress(OSError):  # a folder that is no more; what stays is swept
                self._temporary.unlink(missing_ok=True)
