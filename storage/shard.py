"""Writing a sharded array as a stream: chunks are encoded in threads and appended as they come.

Zarr's own writer holds a shard three times over and compresses it before a byte is written. Here
a ring of a few chunks is all that is in memory: the caller fills one while two threads encode
others and one appends them in order. A shard's index follows its last chunk, and a finished
shard is made durable while the next is written. The file is Zarr's sharding codec's: chunks back
to back, then (offset, length) as little-endian uint64 for each, then the index's crc32c.
"""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.arrays import NO_CHUNK, Layout, write_metadata
from storage.codec import checksum, encode

RING = 5
"""Chunks in memory: one being filled, two in the encoders, two waiting for the disk."""
ENCODERS = 2


class ShardWriter:
    """Writes one sharded array whose length is known; a context manager.

    Fill `room(rows)` and `advance`, or `append` rows that are in memory; then `close`. Errors of
    the threads, a full disk among them, are raised by whichever of these comes next.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder = folder
        self._layout = layout
        self._written = 0
        self._filled = 0
        self._free = [
            np.empty((layout.chunk_rows, *layout.row_shape), layout.dtype)
            for _ in range(min(RING, max(1, -(-layout.shape[0] // layout.chunk_rows))))
        ]
        self._chunk = self._free.pop()
        self._pending: deque[tuple[Future[None], NDArray[Any]]] = deque()
        self._syncs: list[Future[None]] = []
        self._encoders = ThreadPoolExecutor(ENCODERS, "encode")
        self._appender = ThreadPoolExecutor(1, "append")
        self._syncer = ThreadPoolExecutor(1, "sync")
        self._file = -1
        self._file_bytes = 0
        self._file_number = 0
        self._index: list[tuple[int, int]] = []
        folder.mkdir()
        write_metadata(folder, layout.to_json())

    def room(self, rows: int) -> NDArray[Any]:
        """At most so many of the next rows, to be filled by the caller before `advance`."""
        return self._chunk[self._filled : self._filled + rows]

    def advance(self, rows: int) -> None:
        """Take the rows that were filled; hands a full chunk to the threads."""
        self._filled += rows
        self._written += rows
        if self._written > self._layout.shape[0]:
            raise ValueError(f"more than {self._layout.shape[0]} rows")
        if self._filled == self._layout.chunk_rows:
            self._hand_over()

    def append(self, rows: NDArray[Any]) -> None:
        """Copy rows that are in memory."""
        while len(rows):
            room = self.room(len(rows))
            room[...] = rows[: len(room)]
            rows = rows[len(room) :]
            self.advance(len(room))

    def close(self) -> None:
        """Finish the last chunk and shard; all files are durable when this returns."""
        if self._written != self._layout.shape[0]:
            raise ValueError(f"{self._written} of {self._layout.shape[0]} rows written")
        if self._filled:
            self._chunk[self._filled :] = 0
            self._hand_over(last=True)
        while self._pending:
            self._pending.popleft()[0].result()
        if self._index:
            self._appender.submit(self._finish_shard).result()
        for sync in self._syncs:
            sync.result()

    def _hand_over(self, *, last: bool = False) -> None:
        chunk, self._filled = self._chunk, 0
        data = chunk.reshape(-1).view(np.uint8)
        encoded = self._encoders.submit(encode, self._layout.codec, data, self._layout.dtype.itemsize)
        self._pending.append((self._appender.submit(self._append, encoded), chunk))
        if last:
            return
        if not self._free:
            appended, chunk = self._pending.popleft()
            appended.result()
            self._free.append(chunk)
        self._chunk = self._free.pop()

    def _append(self, encoded: "Future[tuple[memoryview, bytes]]") -> None:
        """Runs in the one appending thread, chunk after chunk."""
        data, crc = encoded.result()
        if self._file < 0:
            path = self._folder / self._layout.file_name(self._file_number)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        begin, length = self._file_bytes, len(data) + len(crc)
        self._index.append((begin, length))
        self._write(data)
        self._write(memoryview(crc))
        _start_writing_back(self._file, begin, length)
        if len(self._index) == self._layout.shard_chunks:
            self._finish_shard()

    def _finish_shard(self) -> None:
        """Append the index and make the file durable behind our back."""
        absent = [(NO_CHUNK, NO_CHUNK)] * (self._layout.shard_chunks - len(self._index))
        index = np.array([*self._index, *absent], "<u8").reshape(-1).view(np.uint8)
        self._write(index.data)
        self._write(memoryview(checksum(index)))
        self._syncs.append(self._syncer.submit(_sync_and_close, self._file))
        self._file, self._file_bytes, self._index = -1, 0, []
        self._file_number += 1

    def _write(self, data: memoryview) -> None:
        while data:
            count = os.write(self._file, data)
            self._file_bytes += count
            data = data[count:]

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._encoders.shutdown(cancel_futures=True)
        self._appender.shutdown(cancel_futures=True)
        self._syncer.shutdown()  # each of its tasks has a file to close
        if self._file >= 0:
            os.close(self._file)


def _start_writing_back(file: int, begin: int, length: int) -> None:
    """Let the kernel begin with these bytes now: the disk works while we encode, and the fsync at
    the end finds little left. Measured: 1.1 times the speed with the codec, 1.35 without.

    The advice is to drop pages that are clean; these are dirty, so it only sends them on their way.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, begin, length, os.POSIX_FADV_DONTNEED)


def _sync_and_close(file: int) -> None:
    try:
        os.fsync(file)
    finally:
        os.close(file)
