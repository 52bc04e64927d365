"""A segment: an immutable group of arrays, made where nobody looks and committed by one rename.

The order is: write every file into `.staging/<writer>.<uuid>` inside the store's own file system;
fsync every file, then every folder, deepest first; rename the folder to the next name; fsync the
parent. The rename is the commit and, because it fails on a name that exists, a compare-and-swap
on the sequence number. Killed before it, a writer leaves a staging folder that is swept; after
it, a segment that is whole. Names are never used again. What is in a segment is not known here.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.arrays import ArrayFile, Layout, sharded_layout, write_metadata, write_plain
from storage.codec import CRC_BYTES, Codec, checked
from storage.errors import DamagedError, EyasError, FullError, UnavailableError
from storage.files import NAME, create_json, folder_bytes, fsync_folder, read_whole
from storage.json_records import is_count, parse_json
from storage.shard import ShardWriter
from storage.tokens import ID_BYTES

STAGING = ".staging"
COLUMN_CHUNK_BYTES = 256 << 10
"""Raw bytes of a chunk of token ids or text: a few samples, so that one is read quickly."""
STATES_CHUNK_BYTES = 4 << 20
"""Raw bytes of a chunk of hidden states."""
SHARD_BYTES = 96 << 20
"""Raw bytes of a shard file."""
_BF16_BITS = np.dtype("<u2")
_NAME = re.compile(r"s-(?:(?P<node>.+)-)?(?P<seq>\d{8}|[1-9]\d{8,})")
_SYNC_THREADS = 8
"""Files made durable at once: a journal takes many in one transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentName:
    """`s-<seq>`, or `s-<node>-<seq>` where each node has names of its own."""

    node: str | None
    seq: int

    def __str__(self) -> str:
        return f"s-{self.seq:08}" if self.node is None else f"s-{self.node}-{self.seq:08}"

    @classmethod
    def parse(cls, text: str) -> "SegmentName | None":
        """The name in this text, or None when it is no segment's."""
        found = _NAME.fullmatch(text)
        if found is None or not (found["node"] is None or NAME.fullmatch(found["node"])):
            return None
        return cls(node=found["node"], seq=int(found["seq"]))


def list_segments(parent: Path, but: Collection[str] = ()) -> list[SegmentName]:
    """The committed segments in this folder, by node and number; none when it is not there.

    `but` are names that are known already.
    """
    try:
        found = os.listdir(parent)  # noqa: PTH208 - thousands of names, every second
    except FileNotFoundError:
        return []
    names = [SegmentName.parse(name) for name in found if name not in but]
    return sorted((name for name in names if name), key=lambda name: (name.node or "", name.seq))


class Segment:
    """A committed segment, for reading."""

    def __init__(self, parent: Path, name: SegmentName) -> None:
        """Read the attributes.

        Raises `FileNotFoundError` when a compaction has removed it and `DamagedError`.
        """
        self.name = name
        self.path = parent / str(name)
        try:
            content = parse_json(read_whole(f"{self.path}/zarr.json"))
            self.attributes: dict[str, Any] = dict(content["attributes"])
            self.samples: int = self.attributes["samples"]
            replaces = self.attributes.get("replaces", [])
            if not is_count(self.samples) or self.samples < 0:
                raise ValueError(f"`{self.samples}` samples"[:200])
            # Names that a compaction will delete: they must not lead out of this folder.
            if not all(isinstance(one, str) and SegmentName.parse(one) for one in replaces):
                raise ValueError(f"it replaces `{replaces}`"[:200])
        except FileNotFoundError:
            if not self.path.exists():
                raise
            raise self._damaged("it has no `zarr.json`") from None
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(repr(error)) from None

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(
            f"`{self.path}` is not a segment: {why}",
            code="segment.damaged",
            hint="`storage verify` lists everything that is damaged",
        )

    @property
    def replaces(self) -> frozenset[str]:
        """Names of the segments that a compaction merged into this one."""
        return frozenset(self.attributes.get("replaces", ()))

    def array(self, name: str) -> ArrayFile:
        """One of its arrays."""
        return ArrayFile(self.path / name)

    def column(self, name: str) -> NDArray[Any]:
        """One of its arrays, whole."""
        return self.array(name).read()

    def ids(self, name: str) -> NDArray[np.uint8]:
        """One of its arrays of ids, uint8 [N, 16].

        Their one file is read straight, without the metadata, which is half of the time an index
        takes; anything unusual is left to the ordinary way.
        """
        try:
            data = np.frombuffer(read_whole(f"{self.path}/{name}/c.0.0"), np.uint8)
            if len(data) == self.samples * ID_BYTES + CRC_BYTES:
                return checked(data).reshape(-1, ID_BYTES)
        except (FileNotFoundError, DamagedError):
            pass
        return self.column(name)

    def stored_bytes(self) -> int:
        """Bytes of all of its files."""
        return folder_bytes(self.path)


class Staging:
    """A segment being written; a context manager that removes what was not committed.

    Its methods raise `FullError` when the disk has no room.
    """

    def __init__(
        self, output: Path, writer: str, codec: Codec, guard: Callable[[], None] = lambda: None
    ) -> None:
        """Make its folder; an output folder that is gone is not made again.

        `guard` is called before the rename and may raise. A folder that was deleted has taken this
        one with it: whose run the guard finds there is whose run the rename adds to.
        """
        self.path = output / STAGING / f"{writer}.{uuid.uuid4().hex}"
        self._codec = codec
        self._guard = guard
        with disk_errors(output):
            self.path.parent.mkdir(exist_ok=True)
            self.path.mkdir()

    def plain(self, name: str, values: NDArray[Any]) -> None:
        """Add an array that will be read whole."""
        with disk_errors(self.path.parent.parent):
            write_plain(self.path / name, values)

    def sliced(self, name: str, values: NDArray[Any]) -> None:
        """Add an array that will be read in slices."""
        layout = sharded_layout(
            values.shape, values.dtype, self._codec, chunk_bytes=COLUMN_CHUNK_BYTES, shard_bytes=SHARD_BYTES
        )
        with disk_errors(self.path.parent.parent), ShardWriter(self.path / name, layout) as writer:
            writer.append(values)
            writer.close()

    def stream(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any] = _BF16_BITS,
        chunk_bytes: int = STATES_CHUNK_BYTES,
    ) -> ShardWriter:
        """Add an array of this shape, filled by the caller; of bf16 bits unless told otherwise."""
        layout: Layout = sharded_layout(
            shape, dtype.newbyteorder("<"), self._codec, chunk_bytes=chunk_bytes, shard_bytes=SHARD_BYTES
        )
        with disk_errors(self.path.parent.parent):
            return ShardWriter(self.path / name, layout)

    def finish(self, attributes: Mapping[str, Any]) -> None:
        """Add the group's attributes and make every file, then every folder, durable."""
        with disk_errors(self.path.parent.parent):
            content = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
            write_metadata(self.path, content)
            files, folders = [], []
            for folder, _, names in os.walk(self.path, topdown=False):
                folders.append(Path(folder))
                files += [Path(folder) / name for name in names]
            with ThreadPoolExecutor(_SYNC_THREADS) as pool:
                for _ in pool.map(_fsync_file, files):
                    os.utime(self.path)  # a slow disk is no reason to be swept
            for path in folders:
                fsync_folder(path)

    def commit(self, parent: Path, name: SegmentName) -> bool:
        """Rename it to its name, durably; False when another writer has taken that name."""
        self._guard()
        with disk_errors(self.path.parent.parent):
            try:
                self.path.rename(parent / str(name))
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
            fsync_folder(parent)
        return True

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def create_group(folder: Path, attributes: Mapping[str, Any]) -> None:
    """Make a Zarr group of this folder, durably, unless it is one."""
    folder.mkdir(exist_ok=True)
    if not (folder / "zarr.json").exists():
        content = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
        create_json(folder / "zarr.json", content)
        fsync_folder(folder.parent)


def sweep_staging(output: Path, older_than_s: float) -> int:
    """Remove what killed writers left: staging folders untouched for so long; how many.

    Nothing in a staging folder is promised to anybody, so this never loses a sample; a writer
    that is only slow fails, and its messages come again. A folder leaves its name by one rename
    before a file of it goes: nobody can commit half of one.
    """
    try:
        limit = disk_time(output) - older_than_s
    except FileNotFoundError:
        return 0
    swept = 0
    for path in (output / STAGING).glob("*"):
        aside = path.with_name(f"swept.{uuid.uuid4().hex}")
        try:
            newest = max(p.stat().st_mtime for p in [path, *path.rglob("*")])
            if newest > limit:
                continue
            path.rename(aside)
        except FileNotFoundError:
            continue
        shutil.rmtree(aside, ignore_errors=True)
        swept += 1
    return swept


def disk_time(output: Path) -> float:
    """What time it is where this folder's files get theirs, seconds, Unix: not always this machine's.

    Takes no room, so that a full disk can be swept. Raises `FileNotFoundError` without `.staging`.
    """
    os.utime(output / STAGING)
    return (output / STAGING).stat().st_mtime


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Turn what the disk says into our errors: no room, or not writable."""
    try:
        yield
    except EyasError:
        raise
    except OSError as error:
        # EFBIG: a limit on file sizes stops a writer just as a full disk does.
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise FullError(
                f"no room in `{output}`: {error.strerror}",
                code="output.full",
                hint="free some room there; the work goes on by itself",
            ) from error
        raise UnavailableError(
            f"`{output}` cannot be written: {error.strerror}",
            code="output.unwritable",
            hint="give this user the right to write there, or choose another folder with `--output-dir`",
        ) from error


def _fsync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
