"""The spool: a folder of files through which hidden states pass to the sink of the same machine.

A cache, not a store: nothing is fsynced, a file that is lost or damaged is captured again. Imports
nothing but NumPy, because it also runs inside SGLang. What is in a file is `spool_file.py`'s.

A file is written under a hidden name at its full size, which is how room is reserved between
processes, and renamed into place when it is complete.
"""

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.errors import FullError, UnavailableError, UnsuitableError
from storage.files import NAME, checked_name
from storage.sample import SpoolRef
from storage.spool_file import SpoolReader, SpoolWriter, file_bytes

__all__ = ["Spool", "SpoolReader", "SpoolUsage", "SpoolWriter", "ValueCheck", "check_values", "spool_name"]

BUFFER_BYTES = 4 << 20
"""What a reader holds of a tensor at once."""
FETCHED = ".fetched"
"""Ends the name of a file that somebody fetches over HTTP right away: later it waits for nobody."""
_TEMPORARY = re.compile(r"\..+\.part")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck:
    """What is wrong with a tensor's values; all zero counts for a good one."""

    rows: int
    """Rows looked at, T."""
    non_finite: int
    """Elements that are infinite or not a number."""
    zero_rows: int
    """Rows in which some layer is zero everywhere."""

    @property
    def ok(self) -> bool:
        """Whether the states may be stored."""
        return self.rows > 0 and self.non_finite == 0 and self.zero_rows == 0

    def __add__(self, other: "ValueCheck") -> "ValueCheck":
        """Both parts of a tensor together."""
        return ValueCheck(
            rows=self.rows + other.rows,
            non_finite=self.non_finite + other.non_finite,
            zero_rows=self.zero_rows + other.zero_rows,
        )


NOT_LOOKED = ValueCheck(rows=0, non_finite=0, zero_rows=0)
"""Before the first block of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolUsage:
    """What a spool holds at a moment."""

    used_bytes: int
    """Bytes held and reserved."""
    oldest: float | None
    """When the oldest file was last written, Unix seconds; None when there is none."""


def spool_name(sample_id: bytes) -> str:
    """A file name for one attempt at a prompt: its id and 8 random bytes, in hex."""
    return f"{sample_id.hex()}-{secrets.token_hex(8)}"


class Spool:
    """One machine's spool folder, shared by its processes."""

    def __init__(self, folder: Path, node: str, max_bytes: int) -> None:
        """Open the spool, creating the folder for this user alone.

        Raises `UnavailableError` when it cannot be created and `UnsuitableError` when it is
        another user's or a link.
        """
        self.folder = folder
        self.node = checked_name(node, "node")
        self.max_bytes = max_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
        except OSError as error:
            raise UnavailableError(
                f"spool folder `{folder}`: {error.strerror}",
                code="spool.unwritable",
                hint="point EYAS_SPOOL_DIR to a folder this user may write",
            ) from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() != 0:
            raise UnsuitableError(
                f"spool folder `{folder}` belongs to another user or is a link",
                code="spool.unsafe",
                hint="point EYAS_SPOOL_DIR to a folder of your own",
            )

    def writer(self, name: str, shape: tuple[int, int, int]) -> SpoolWriter:
        """A writer of one tensor [T, L, H], its room reserved.

        Raises `FullError` when the spool would pass its limit or the disk is full.
        """
        checked_name(name, "spool file")
        size_bytes = file_bytes(shape)
        self.check_room(size_bytes, size_bytes)
        return SpoolWriter(self.folder, self.node, name, shape)

    def check_room(self, size_bytes: int, more_bytes: int) -> None:
        """Raises `FullError` unless a file of this size may take so many bytes more than it has."""
        if size_bytes > self.max_bytes:
            raise FullError(
                f"a sample of `{size_bytes}` bytes never fits in the spool `{self.folder}` of "
                f"`{self.max_bytes}`",
                code="spool.full",
                hint=f"raise EYAS_SPOOL_MAX_GB above `{size_bytes / 1e9:g}`",
            )
        if self.used_bytes() + more_bytes > self.max_bytes:
            raise FullError(
                f"the spool `{self.folder}` holds its limit of `{self.max_bytes}` bytes",
                code="spool.full",
                hint="a sink on this node empties it: `celery -A workers worker -Q sink`; or raise "
                "EYAS_SPOOL_MAX_GB",
            )

    def write(self, name: str, states: NDArray[np.uint16]) -> SpoolRef:
        """Write one whole tensor, uint16 [T, L, H] of bf16 bits."""
        t, layers, hidden = states.shape
        with self.writer(name, (t, layers, hidden)) as writer:
            writer.write(states)
            return writer.commit()

    def reader(self, ref: SpoolRef) -> SpoolReader:
        """A reader of one tensor; raises `SpoolLostError` when it is gone or another."""
        return SpoolReader(self.folder, self.node, ref)

    def blocks(self, ref: SpoolRef, buffer_bytes: int = BUFFER_BYTES) -> Iterator[NDArray[np.uint16]]:
        """The tensor in blocks of rows, uint16 [t, L, H].

        Each block is overwritten by the next: copy what is to be kept. Read with `readinto`, not
        mapped, since mapped pages would count as this process's memory. Raises `SpoolLostError`
        when the file is gone or another, and at the end when the checksum does not match.
        """
        t, layers, hidden = ref.shape
        rows = max(1, min(t, buffer_bytes // (layers * hidden * 2)))
        buffer = np.empty((rows, layers, hidden), np.uint16)
        with self.reader(ref) as reader:
            for start in range(0, t, rows):
                block = buffer[: min(rows, t - start)]
                reader.readinto(block)
                yield block
            reader.check()

    def check_values(self, ref: SpoolRef) -> ValueCheck:
        """Look at every value without holding the tensor; raises as `blocks` does."""
        return sum(map(check_values, self.blocks(ref)), start=NOT_LOOKED)

    def delete(self, ref: SpoolRef) -> None:
        """Free the file's room; nothing happens when it is gone already."""
        if NAME.fullmatch(ref.name):
            (self.folder / ref.name).unlink(missing_ok=True)

    def sweep(self, older_than_s: float, ending: str = "") -> int:
        """Delete every file of this ending not touched for so many seconds; how many those were."""
        limit = time.time() - older_than_s
        swept = 0
        for entry in self._files():
            if not entry.name.endswith(ending):
                continue
            try:
                if entry.stat(follow_symlinks=False).st_mtime <= limit:
                    Path(entry.path).unlink()
                    swept += 1
            except FileNotFoundError:
                continue
        return swept

    def used_bytes(self) -> int:
        """Bytes held and reserved, over all processes."""
        return self.usage().used_bytes

    def usage(self) -> SpoolUsage:
        """What it holds, over all processes."""
        used, oldest = 0, None
        for entry in self._files():
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            used += status.st_size
            oldest = status.st_mtime if oldest is None else min(oldest, status.st_mtime)
        return SpoolUsage(used_bytes=used, oldest=oldest)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Only what a spool may have written: the folder may be a shared one by mistake."""
        try:
            found = os.scandir(self.folder)
        except FileNotFoundError:
            return
        with found as entries:
            for entry in entries:
                known = NAME.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name)
                if known and entry.is_file(follow_symlinks=False):
                    yield entry


def check_values(states: NDArray[np.uint16]) -> ValueCheck:
    """Count what no forward pass gives: bf16 bits uint16 [t, L, H] not finite, or zero rows.

    A bf16 is not finite when all 8 bits of its exponent are set.
    """
    magnitude = states & np.uint16(0x7FFF)
    peaks = magnitude.max(axis=-1)
    non_finite = int(np.count_nonzero(magnitude >= 0x7F80)) if int(peaks.max(initial=0)) >= 0x7F80 else 0
    zero_rows = int(np.count_nonzero((peaks == 0).any(axis=-1)))
    return ValueCheck(rows=len(states), non_finite=non_finite, zero_rows=zero_rows)
