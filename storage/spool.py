"""The spool: files through which hidden states pass to the sink of the same machine.

A cache, not a store: nothing is fsynced, a file that is lost or damaged is captured again. This
file does not know the store, and imports nothing but NumPy, because it also runs inside SGLang.

A spool file is a header of `HEADER_BYTES` and then the tensor's bf16 bits, little-endian, row by
row. The header is `EYASPOOL`, a u32 version, a u32 length, then that many bytes of JSON (dtype,
shape, crc32), then spaces. A file is written under a hidden name at its full size, which is how
room is reserved between processes, and renamed into place when it is complete.
"""

import errno
import json
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from storage.errors import FullError, SpoolLostError, UnavailableError, UnsuitableError
from storage.files import NAME, checked_name
from storage.sample import SpoolRef

MAGIC = b"EYASPOOL"
VERSION = 1
HEADER_BYTES = 512
"""Where the tensor begins: room for the JSON, which is known only at the end."""
BUFFER_BYTES = 4 << 20
"""What a reader holds of a tensor at once."""
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

    def writer(self, name: str, shape: tuple[int, int, int]) -> "SpoolWriter":
        """A writer of one tensor [T, L, H], its room reserved.

        Raises `FullError` when the spool would pass its limit or the disk is full.
        """
        checked_name(name, "spool file")
        size = HEADER_BYTES + int(np.prod(shape, dtype=np.int64)) * 2
        if self.used_bytes() + size > self.max_bytes:
            raise FullError(
                f"the spool `{self.folder}` holds its limit of `{self.max_bytes}` bytes",
                code="spool.full",
                hint="a sink on this node empties it: `celery -A workers worker -Q sink`; or raise "
                "EYAS_SPOOL_MAX_GB",
            )
        return SpoolWriter(self, name, shape)

    def write(self, name: str, states: NDArray[np.uint16]) -> SpoolRef:
        """Write one whole tensor, uint16 [T, L, H] of bf16 bits."""
        t, layers, hidden = states.shape
        with self.writer(name, (t, layers, hidden)) as writer:
            writer.write(states)
            return writer.commit()

    def reader(self, ref: SpoolRef) -> "SpoolReader":
        """A reader of one tensor; raises `SpoolLostError` when it is gone or another."""
        return SpoolReader(self, ref)

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
        rows = non_finite = zero_rows = 0
        for block in self.blocks(ref):
            found = check_values(block)
            rows += found.rows
            non_finite += found.non_finite
            zero_rows += found.zero_rows
        return ValueCheck(rows=rows, non_finite=non_finite, zero_rows=zero_rows)

    def delete(self, ref: SpoolRef) -> None:
        """Free the file's room; nothing happens when it is gone already."""
        if NAME.fullmatch(ref.name):
            (self.folder / ref.name).unlink(missing_ok=True)

    def sweep(self, older_than_s: float) -> int:
        """Delete every file not touched for so many seconds; how many those were."""
        limit = time.time() - older_than_s
        swept = 0
        for entry in self._files():
            try:
                if entry.stat(follow_symlinks=False).st_mtime <= limit:
                    Path(entry.path).unlink()
                    swept += 1
            except FileNotFoundError:
                continue
        return swept

    def used_bytes(self) -> int:
        """Bytes held and reserved, over all processes."""
        used = 0
        for entry in self._files():
            try:
                used += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
        return used

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Only what a spool may have written: the folder may be a shared one by mistake."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                known = NAME.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name)
                if known and entry.is_file(follow_symlinks=False):
                    yield entry


class SpoolWriter:
    """Writes one tensor row by row; a context manager that aborts what is not committed."""

    def __init__(self, spool: Spool, name: str, shape: tuple[int, int, int]) -> None:
        self._spool = spool
        self._name = name
        self._shape = shape
        self._rows = 0
        self._crc32 = 0
        self._temporary = spool.folder / f".{name}.{secrets.token_hex(4)}.part"
        size = HEADER_BYTES + int(np.prod(shape, dtype=np.int64)) * 2
        self._file = self._temporary.open("xb", buffering=0)
        try:
            os.fchmod(self._file.fileno(), 0o600)
            self._file.truncate(size)
            self._file.seek(HEADER_BYTES)
        except OSError as error:
            self.abort()
            raise _spool_error(spool.folder, error) from None

    def write(self, rows: NDArray[np.uint16]) -> None:
        """Append rows, uint16 [t, L, H] or one row [L, H]; raises `FullError` without room."""
        rows = rows.reshape(-1, *rows.shape[-2:])
        if rows.dtype.itemsize != 2 or rows.shape[1:] != self._shape[1:]:
            raise ValueError(f"rows of {rows.dtype} {rows.shape[1:]} in a spool file of {self._shape}")
        if self._rows + len(rows) > self._shape[0]:
            raise ValueError(f"more than {self._shape[0]} rows")
        data = np.ascontiguousarray(rows, dtype="<u2").reshape(-1).view(np.uint8).data
        self._crc32 = zlib.crc32(data, self._crc32)
        self._rows += len(rows)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self.abort()
            raise _spool_error(self._spool.folder, error) from None

    def commit(self) -> SpoolRef:
        """Give the file its header and its name; what other processes may know of it."""
        if self._rows != self._shape[0]:
            raise ValueError(f"{self._rows} of {self._shape[0]} rows written")
        content = {"dtype": "bfloat16", "shape": self._shape, "crc32": self._crc32}
        text = json.dumps(content).encode()
        header = MAGIC + VERSION.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text
        try:
            self._file.seek(0)
            self._file.write(header.ljust(HEADER_BYTES))
            self._file.close()
            self._temporary.rename(self._spool.folder / self._name)
        except OSError as error:
            self.abort()
            raise _spool_error(self._spool.folder, error) from None
        return SpoolRef(node=self._spool.node, name=self._name, shape=self._shape, crc32=self._crc32)

    def abort(self) -> None:
        """Forget the file; nothing happens after a commit."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> "SpoolWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class SpoolReader:
    """Reads one tensor front to back into buffers of the caller, checking as it goes."""

    def __init__(self, spool: Spool, ref: SpoolRef) -> None:
        self._ref = ref
        self._crc32 = 0
        self._left = ref.size_bytes
        if ref.node != spool.node or not NAME.fullmatch(ref.name):
            raise self._lost("is not of this spool")
        try:
            handle = os.open(spool.folder / ref.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise self._lost(error.strerror or "cannot be opened") from None
        self._file = os.fdopen(handle, "rb", buffering=0)
        try:
            if os.fstat(handle).st_size != HEADER_BYTES + ref.size_bytes:
                raise self._lost("has another size")
            if _read_header(self._file.read(HEADER_BYTES)) != (ref.shape, ref.crc32):
                raise self._lost("holds another tensor")
        except BaseException:
            self._file.close()
            raise

    def readinto(self, rows: NDArray[np.uint16]) -> None:
        """Fill contiguous `rows`, uint16 [t, L, H], with the next rows."""
        buffer = rows.reshape(-1).view(np.uint8).data
        filled = 0
        while filled < len(buffer):
            try:
                count = self._file.readinto(buffer[filled:])
            except OSError as error:
                raise self._lost(error.strerror or "cannot be read") from None
            if not count:
                raise self._lost("ends early")
            filled += count
        self._crc32 = zlib.crc32(buffer, self._crc32)
        self._left -= len(buffer)

    def check(self) -> None:
        """Raises `SpoolLostError` unless the whole tensor was read and its checksum matches."""
        if self._left or self._crc32 != self._ref.crc32:
            raise self._lost("does not match its checksum")

    def _lost(self, why: str) -> SpoolLostError:
        return SpoolLostError(f"spool file `{self._ref.name}` {why}", code="spool.lost")

    def __enter__(self) -> "SpoolReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def check_values(states: NDArray[np.uint16]) -> ValueCheck:
    """Count what no forward pass gives: bf16 bits uint16 [t, L, H] not finite, or zero rows.

    A bf16 is not finite when all 8 bits of its exponent are set.
    """
    magnitude = states & np.uint16(0x7FFF)
    peaks = magnitude.max(axis=-1)
    non_finite = int(np.count_nonzero(magnitude >= 0x7F80)) if int(peaks.max(initial=0)) >= 0x7F80 else 0
    zero_rows = int(np.count_nonzero((peaks == 0).any(axis=-1)))
    return ValueCheck(rows=len(states), non_finite=non_finite, zero_rows=zero_rows)


def _read_header(header: bytes) -> tuple[tuple[int, ...], int] | None:
    """Shape and crc32, or None when these bytes are no header of this version."""
    length = int.from_bytes(header[12:16], "little")
    if header[:8] != MAGIC or int.from_bytes(header[8:12], "little") != VERSION or length > HEADER_BYTES - 16:
        return None
    try:
        content = json.loads(header[16 : 16 + length])
        return tuple(content["shape"]), content["crc32"]
    except (ValueError, KeyError, TypeError):
        return None


def _spool_error(folder: Path, error: OSError) -> FullError | UnavailableError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FullError(f"no room for the spool `{folder}`: {error.strerror}", code="spool.full")
    return UnavailableError(f"spool folder `{folder}`: {error.strerror}", code="spool.unwritable")
