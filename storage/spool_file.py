"""One spool file: its header, writing it row by row, reading it with its checksum.

The header takes `HEADER_BYTES`: `EYASPOOL`, a u32 version, a u32 length, that many bytes of JSON
(dtype, shape, crc32), then spaces; the tensor's bf16 bits follow, little-endian, row by row. The
folder, its limit and its sweeping are `spool.py`'s.
"""

import errno
import json
import os
import secrets
import zlib
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from storage.errors import FullError, SpoolLostError, UnavailableError
from storage.files import NAME
from storage.json_records import parse_json
from storage.sample import SpoolRef

MAGIC = b"EYASPOOL"
VERSION = 1
HEADER_BYTES = 512
"""Where the tensor begins: room for the JSON, which is known only at the end."""


def file_bytes(shape: tuple[int, int, int]) -> int:
    """Size of the file of a tensor [T, L, H]."""
    t, layers, hidden = shape
    return HEADER_BYTES + t * layers * hidden * 2


def header(shape: tuple[int, int, int], crc32: int) -> bytes:
    """The first `HEADER_BYTES` of the file of a tensor [T, L, H]."""
    text = json.dumps({"dtype": "bfloat16", "shape": shape, "crc32": crc32}).encode()
    return (MAGIC + VERSION.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text).ljust(
        HEADER_BYTES
    )


class SpoolWriter:
    """Writes one tensor row by row; a context manager that aborts what is not committed."""

    def __init__(self, folder: Path, node: str, name: str, shape: tuple[int, int, int]) -> None:
        self._folder = folder
        self._node = node
        self._name = name
        self._shape = shape
        self._rows = 0
        self._crc32 = 0
        self._temporary = folder / f".{name}.{secrets.token_hex(4)}.part"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)  # whatever cleans /tmp may have taken it
            self._file = self._temporary.open("xb", buffering=0)
        except OSError as error:
            raise spool_error(folder, error) from None
        try:
            os.fchmod(self._file.fileno(), 0o600)
            self._file.truncate(file_bytes(shape))
            self._file.seek(HEADER_BYTES)
        except OSError as error:
            self.abort()
            raise spool_error(folder, error) from None

    @property
    def crc32(self) -> int:
        """Of the rows so far."""
        return self._crc32

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
            raise spool_error(self._folder, error) from None

    def commit(self) -> SpoolRef:
        """Give the file its header and its name; what other processes may know of it."""
        if self._rows != self._shape[0]:
            raise ValueError(f"{self._rows} of {self._shape[0]} rows written")
        try:
            self._file.seek(0)
            self._file.write(header(self._shape, self._crc32))
            self._file.close()
            self._temporary.rename(self._folder / self._name)
        except OSError as error:
            self.abort()
            raise spool_error(self._folder, error) from None
        return SpoolRef(node=self._node, name=self._name, shape=self._shape, crc32=self._crc32)

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

    def __init__(self, folder: Path, node: str, ref: SpoolRef) -> None:
        self._ref = ref
        self._crc32 = 0
        self._left = ref.size_bytes
        if ref.node != node or not NAME.fullmatch(ref.name):
            raise self._lost("is not of this spool")
        try:
            handle = os.open(folder / ref.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            code = "spool.missing" if isinstance(error, FileNotFoundError) else "spool.lost"
            raise self._lost(error.strerror or "cannot be opened", code) from None
        self._file = os.fdopen(handle, "rb", buffering=0)
        try:
            if os.fstat(handle).st_size != file_bytes(ref.shape):
                raise self._lost("has another size")
            if read_header(self._file.read(HEADER_BYTES)) != (ref.shape, ref.crc32):
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

    def _lost(self, why: str, code: str = "spool.lost") -> SpoolLostError:
        return SpoolLostError(f"spool file `{self._ref.name}`: {why}", code=code)

    def __enter__(self) -> "SpoolReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_header(header: bytes) -> tuple[tuple[int, ...], int] | None:
    """Shape and crc32, or None when these bytes are no header of this version."""
    length = int.from_bytes(header[12:16], "little")
    if header[:8] != MAGIC or int.from_bytes(header[8:12], "little") != VERSION or length > HEADER_BYTES - 16:
        return None
    try:
        content = parse_json(header[16 : 16 + length])
        return tuple(content["shape"]), content["crc32"]
    except (ValueError, KeyError, TypeError):
        return None


def spool_error(folder: Path, error: OSError) -> FullError | UnavailableError:
    """What the system's error means for who writes here."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FullError(f"no room for the spool `{folder}`: {error.strerror}", code="spool.full")
    return UnavailableError(f"spool folder `{folder}`: {error.strerror}", code="spool.unwritable")
