"""A Zarr v3 array as files: its metadata, writing a small one whole, reading any of them.

Two layouts are written, both cut along the first axis only: **plain** (one chunk, crc32c, for
what an index reads whole) and **sharded** (chunks of a few MB in shards, compressed, for what is
read in slices; streamed by `shard.py`). Chunk files lie beside `zarr.json` as `c.0.0`, so an
array has one folder to make durable. Arrays of other layouts, written by other tools, are read
through zarr itself.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.codec import (
    BYTES_CODEC,
    CRC_BYTES,
    CRC_CODEC,
    Codec,
    checked,
    checksum,
    codec_from_metadata,
    codec_metadata,
    decode,
)
from storage.errors import DamagedError
from storage.files import read_whole
from storage.json_records import is_count, parse_json

NO_CHUNK = 2**64 - 1
"""What a shard's index holds for a chunk that was not written: it is all zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An array's shape and how it is cut."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """Little-endian integers or floats."""
    chunk_rows: int
    """Rows of a chunk, compressed together."""
    shard_rows: int | None
    """Rows of a shard file; None when each chunk is its own file."""
    codec: Codec

    @property
    def row_shape(self) -> tuple[int, ...]:
        """All axes but the first, which are never cut."""
        return self.shape[1:]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, raw."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def shard_chunks(self) -> int:
        """Chunks of a file."""
        return 1 if self.shard_rows is None else self.shard_rows // self.chunk_rows

    @property
    def files(self) -> int:
        """How many files hold the array."""
        return -(-self.shape[0] // (self.shard_rows or self.chunk_rows))

    def file_name(self, number: int) -> str:
        """The name of the file with this number along the first axis."""
        return ".".join(["c", str(number), *["0"] * len(self.row_shape)])

    def to_json(self) -> dict[str, Any]:
        """As `zarr.json` holds it."""
        codecs = codec_metadata(self.codec, self.dtype)
        if self.shard_rows is not None:
            sharding = {
                "chunk_shape": [self.chunk_rows, *self.row_shape],
                "codecs": codecs,
                "index_codecs": [BYTES_CODEC, CRC_CODEC],
                "index_location": "end",
            }
            codecs = [{"name": "sharding_indexed", "configuration": sharding}]
        file_shape = [self.shard_rows or self.chunk_rows, *self.row_shape]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": file_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0.0 if self.dtype.kind == "f" else 0,
            "codecs": codecs,
            "attributes": {},
            "storage_transformers": [],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Layout | None":
        """The inverse of `to_json`, or None for a layout that this file does not write."""
        try:
            shape = tuple(content["shape"])
            rows, *rest = content["chunk_grid"]["configuration"]["chunk_shape"]
            codecs, shard_rows = content["codecs"], None
            if codecs[0]["name"] == "sharding_indexed":
                sharding = codecs[0]["configuration"]
                shard_rows, (rows, *rest), codecs = rows, sharding["chunk_shape"], sharding["codecs"]
                if sharding["index_location"] != "end" or len(sharding["index_codecs"]) != 2:
                    return None
            codec = codec_from_metadata(codecs)
            separator = content["chunk_key_encoding"]["configuration"]["separator"]
            endian = codecs[0].get("configuration", {}).get("endian", "little")
            if codec is None or endian != "little" or separator != "." or tuple(rest) != shape[1:]:
                return None
            dtype = np.dtype(content["data_type"]).newbyteorder("<")
            shards = rows if shard_rows is None else shard_rows
            if not (is_count(rows) and is_count(shards)) or rows < 1 or shards < rows or shards % rows:
                return None
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return None
        return cls(shape=shape, dtype=dtype, chunk_rows=rows, shard_rows=shard_rows, codec=codec)


def plain_layout(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Layout:
    """The layout of an array that is read whole."""
    return Layout(shape=shape, dtype=dtype, chunk_rows=max(1, shape[0]), shard_rows=None, codec=Codec.NONE)


def sharded_layout(
    shape: tuple[int, ...], dtype: np.dtype[Any], codec: Codec, *, chunk_bytes: int, shard_bytes: int
) -> Layout:
    """The layout of an array that is read in slices.

    A chunk has at most `chunk_bytes` and at least about half of it. Within that its rows are
    chosen so that the last chunk, which is stored at its full size, is padded least: padding is
    written, and without a codec it is not even compressed.
    """
    row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
    most = max(1, min(shape[0], chunk_bytes // row_bytes))
    rows = min(range(most, most // 2, -1), key=lambda rows: -shape[0] % rows)
    chunks = max(1, min(-(-shape[0] // rows), shard_bytes // (rows * row_bytes)))
    return Layout(shape=shape, dtype=dtype, chunk_rows=rows, shard_rows=rows * chunks, codec=codec)


def write_metadata(folder: Path, content: Mapping[str, Any]) -> None:
    """Write `zarr.json` into a folder that nobody sees yet."""
    (folder / "zarr.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_plain(folder: Path, values: NDArray[Any]) -> None:
    """Write a whole array as one chunk, into a new folder."""
    folder.mkdir()
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    layout = plain_layout(values.shape, values.dtype)
    if values.shape[0]:
        data = values.reshape(-1).view(np.uint8)
        with (folder / layout.file_name(0)).open("wb", buffering=0) as file:
            # One write may stop early on a full disk; a buffered file would hide how far it got.
            for part in (data.data, memoryview(checksum(data))):
                while part:
                    part = part[file.write(part) :]
    write_metadata(folder, layout.to_json())


class ArrayFile:
    """Reads one array; holds no file open, so that a forked process may go on with it."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata; raises `FileNotFoundError`, or `DamagedError` when it is no array's."""
        self.folder = folder
        try:
            content = parse_json(read_whole(f"{folder}/zarr.json"))
            self.shape: tuple[int, ...] = tuple(content["shape"])
            if not self.shape or not all(is_count(size) and size >= 0 for size in self.shape):
                raise ValueError(f"shape `{self.shape}`"[:200])
            if not isinstance(content["data_type"], str):
                raise ValueError(f"data type `{content['data_type']}`"[:200])
            self.dtype = np.dtype(content["data_type"])
            if self.dtype.kind not in "biuf":  # never objects: their bytes would be pointers
                raise ValueError(f"data type `{self.dtype}`")
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"`{folder}` is not an array: {error!r}", code="array.damaged") from None
        self._layout = Layout.from_json(content)
        self._indexes: dict[int, NDArray[np.uint64]] = {}

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def chunk_rows(self) -> int:
        """Rows that are decoded together: reading from one multiple of it to the next wastes nothing."""
        return self._layout.chunk_rows if self._layout else 1024

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Rows `[start, stop)`.

        Raises `DamagedError` naming the file, and `FileNotFoundError` when a compaction, or
        somebody, has taken it away.
        """
        start, stop = int(start), self.shape[0] if stop is None else min(int(stop), self.shape[0])
        out = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
        if self._layout is None:
            return self._read_by_zarr(start, stop)
        layout = self._layout
        if layout.row_bytes == 0 or not len(out):
            return out
        for number in range(start // layout.chunk_rows, -(-stop // layout.chunk_rows)):
            first = number * layout.chunk_rows
            begin, end = max(start, first), min(stop, first + layout.chunk_rows)
            target = out[begin - start : end - start]
            if len(target) == layout.chunk_rows:
                self._read_chunk(number, target)
            else:
                whole = np.empty((layout.chunk_rows, *layout.row_shape), self.dtype)
                self._read_chunk(number, whole)
                target[...] = whole[begin - first : end - first]
        return out

    def stored_bytes(self) -> int:
        """Bytes of all of the array's files."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def _read_chunk(self, number: int, out: NDArray[Any]) -> None:
        """Fill `out`, one whole contiguous chunk."""
        layout = self._layout
        assert layout is not None
        file_number, slot = divmod(number, layout.shard_chunks)
        path = f"{self.folder}/{layout.file_name(file_number)}"
        flat = out.reshape(-1).view(np.uint8)
        try:
            if layout.shard_rows is None:
                decode(layout.codec, _bytes(read_whole(path)), flat)
                return
            index = self._indexes.get(file_number)
            if index is None:
                index = self._indexes[file_number] = _read_index(path, layout.shard_chunks)
            offset, length = (int(value) for value in index[slot])
            if offset == NO_CHUNK:
                flat[:] = 0
                return
            decode(layout.codec, _bytes(read_whole(path, length, offset)), flat)
        except DamagedError as error:
            raise DamagedError(f"`{path}`, chunk {slot}: {error.message}", code=error.code) from None

    def _read_by_zarr(self, start: int, stop: int) -> NDArray[Any]:
        import zarr

        try:
            # Never version 2, whose arrays may hold pickled objects.
            array = zarr.open_array(str(self.folder), mode="r", zarr_format=3)
            return np.asarray(array[start:stop])
        # The edge where foreign metadata enters a library that says in many ways what is wrong with it.
        except Exception as error:
            raise DamagedError(f"`{self.folder}`: {error!r}"[:500], code="array.damaged") from None


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _read_index(path: str, chunks: int) -> NDArray[np.uint64]:
    """A shard's index, uint64 [chunks, 2]: where each chunk begins and its length in bytes."""
    size = chunks * 16 + CRC_BYTES
    begin = Path(path).stat().st_size - size
    if begin < 0:
        raise DamagedError("the file is cut short", code="shard.short")
    index = checked(_bytes(read_whole(path, size, begin))).view("<u8").reshape(chunks, 2)
    ends = index.sum(axis=1)[index[:, 0] != NO_CHUNK]
    if np.any(ends > begin) or np.any(index[:, 0][index[:, 0] != NO_CHUNK] > begin):
        raise DamagedError("the index points past the end", code="shard.index")
    return index
