"""Small files that must never be seen half-written: JSON replaced atomically, names confined.

Durable replacement is: write beside, fsync, rename, fsync the folder. A crash between any two
steps leaves the old file or the new one, and at worst a `.tmp` that the next write replaces.
"""

import errno
import json
import os
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from storage.errors import DamagedError, UsageError
from storage.json_records import parse_json

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a dataset, node or capture may be called: it becomes a folder's name."""
GROUP_FILE = "zarr.json"
"""What lies beside those folders, so that none may be called so."""


def checked_name(name: str, what: str) -> str:
    """The name, when it can be a folder's name everywhere.

    Raises `UsageError` otherwise.
    """
    if not NAME.fullmatch(name) or name.casefold() == GROUP_FILE:
        raise UsageError(
            f"{what} `{name}` cannot be a folder's name",
            code="name.unsafe",
            hint="use letters, digits, `.`, `_` and `-`, at most 100, beginning with a letter or digit",
        )
    return name


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; what others delete meanwhile does not count."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(os.path.join(parent, name)).st_size  # noqa: PTH116, PTH118 - thousands
    return size


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` by `content`, durably and at once."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    # Half a UTF-16 pair, which JSON from elsewhere may hold, must not keep the rest from being kept.
    with temporary.open("w", encoding="utf-8", errors="replace") as file:
        json.dump(content, file, indent=2, sort_keys=True, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`.

    Raises `DamagedError` when it is not a JSON object and `FileNotFoundError` when it is not there.
    """
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise DamagedError(f"`{path}` is not JSON: {error}", code="file.damaged") from None
    if not isinstance(content, dict):
        raise DamagedError(f"`{path}` does not hold a JSON object", code="file.damaged")
    return content


def read_whole(path: str, size: int = -1, offset: int = 0) -> bytes:
    """A file's bytes from `offset`, or `size` of them; fewer when it ends before.

    An index reads thousands of small files: this takes a third of the time of `Path.read_bytes`.
    """
    try:
        return _read_whole(path, size, offset)
    except OSError as error:
        # What NFS says of a file that another machine has deleted while this one had it open.
        if error.errno == errno.ESTALE:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        raise


def _read_whole(path: str, size: int, offset: int) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        left = os.fstat(handle).st_size - offset
        left = left if size < 0 else min(size, left)
        data = os.pread(handle, left, offset) if left > 0 else b""
        while len(data) < left:  # a read gives at most 2 GB
            more = os.pread(handle, left - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(handle)


def create_json(path: Path, content: Mapping[str, Any]) -> bool:
    """Write `path`, durably, unless it exists: of two that try at once, one does it.

    False when it was there already.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write_json(temporary, content)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return True
