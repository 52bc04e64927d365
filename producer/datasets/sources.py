"""Sources: the files a dataset is read from, their digest, and their rows one by one.

JSONL goes through the `text` builder of the `datasets` library and is parsed line by line, so one
broken line is one broken row and rows of mixed types are no matter; Parquet streams through its
own builder. A JSON array is read whole: the format leaves no other way. Nothing here asks a
network, and what a row means is in `forms.py`.
"""

import atexit
import glob
import gzip
import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from producer.datasets.line_bounds import ARRAY, LINES, PARQUET, check_size
from storage.errors import UsageError
from storage.json_records import parse_json

HASH_BLOCK_BYTES = 1 << 20
ROWS_AT_ONCE = 1024
"""Lines, or rows of a table, read at once."""
TABLE_ROWS_AT_ONCE = 64
"""Rows of these that are Python objects at once: a token id takes 36 bytes then, 4 in the table."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source."""

    number: int
    """From 0 over all files of the source; blank lines count, so line = number + 1 in a first file."""
    where: str
    """File name and line or row, for people."""
    value: Any
    """What JSON or Parquet holds there; None when broken."""
    broken: str | None = None
    """Why it cannot be read."""


def find_files(source: str, folder: Path) -> tuple[Path, ...]:
    """The files that `file:…` names, sorted by path.

    Raises `UsageError` when there is none, one cannot be read, or all are empty.
    """
    pattern = Path(source.removeprefix("file:").strip()).expanduser()
    path = folder / pattern
    found = [path] if path.is_file() else _matching(pattern, folder)
    files = tuple(file for file in found if file.is_file())
    if not files:
        what = "is a folder: name its files, as `folder/*.jsonl`" if path.is_dir() else "is not there"
        raise UsageError(
            f"`{path}` {what}",
            code="source.missing",
            hint="paths are relative to the manifest's folder",
        )
    for file in files:
        if not os.access(file, os.R_OK):
            raise UsageError(f"`{file}` cannot be read", code="source.unreadable", hint=f"chmod a+r '{file}'")
        _kind(file)
    if not any(file.stat().st_size for file in files):
        raise UsageError(
            f"`{files[0]}` is empty", code="source.empty", hint="take the dataset out, or fill the file"
        )
    return files


def _matching(pattern: Path, folder: Path) -> list[Path]:
    # `Path.glob` takes no absolute pattern before Python 3.13
    names = glob.glob(str(pattern), root_dir=folder, recursive=True)  # noqa: PTH207
    return [folder / name for name in sorted(names)]


def source_digest(files: Sequence[Path]) -> str:
    """BLAKE2b-16 in hex over each file's length and bytes, in order; names do not count.

    Raises `UsageError` for a file whose lines, or whose one array, would not fit into memory.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        check_size(file, _kind(file))
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            while block := opened.read(HASH_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def read_rows(files: Sequence[Path], start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows from number `start` on. Blank lines are passed over.

    `columns` are all that is read of Parquet files; None reads every column.
    Raises `UsageError` for a file that is not what its name says.
    """
    base = 0
    for file in files:
        kind = _kind(file)
        inside = 0
        try:
            for values in _batches(file, kind, columns):
                for i in range(max(0, start - base - inside), len(values)):
                    row = _row(file, kind, base + inside + i, inside + i, values[i])
                    if row is not None:
                        yield row
                inside += len(values)
        # The edge where foreign files enter libraries that say in many ways what is wrong with them.
        except Exception as error:
            raise UsageError(
                f"`{file}` cannot be read as {kind}: {error or type(error).__name__}"[:500],
                code="source.damaged",
                hint="check that the file is complete and is what its name says",
            ) from None
        base += inside


def _row(file: Path, kind: str, number: int, inside: int, value: Any) -> Row | None:
    if kind != LINES:
        return Row(number, f"{file.name} row {inside + 1}", value)
    if not value or value.isspace():
        return None
    where = f"{file.name} line {inside + 1}"
    try:
        return Row(number, where, parse_json(value))
    except ValueError as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:100]
        return Row(number, where, None, broken=why)


KINDS = {".jsonl": LINES, ".ndjson": LINES, ".json": ARRAY, ".parquet": PARQUET}


def _kind(file: Path) -> str:
    """What the file's name says, and for `.json` its first character: many of these hold lines."""
    zipped = file.suffix.lower() == ".gz"
    kind = KINDS.get(Path(file.stem).suffix.lower() if zipped else file.suffix.lower())
    if kind is None or (kind == PARQUET and zipped):
        raise UsageError(
            f"`{file}` is not a kind of file that can be read",
            code="source.kind",
            hint="name .jsonl, .ndjson, .json (also with .gz) or .parquet files",
        )
    if kind == ARRAY:
        with gzip.open(file) if zipped else file.open("rb") as opened:
            try:
                head = opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
            except (OSError, EOFError, zlib.error):
                return kind  # said with its reason when it is read
        return ARRAY if head.startswith(b"[") else LINES
    return kind


def _batches(file: Path, kind: str, columns: Sequence[str] | None) -> Iterator[Sequence[Any]]:
    """The file's lines, objects or rows in lists, in order and gap-free."""
    datasets = _datasets()
    common = {
        "data_files": [glob.escape(str(file))],
        "split": "train",
        "streaming": True,
        "cache_dir": _cache_folder(),
    }
    if kind == PARQUET:
        stream = datasets.load_dataset("parquet", **common)
        if columns is not None:
            present = [name for name in columns if stream.features is None or name in stream.features]
            stream = datasets.load_dataset("parquet", **common, columns=present) if present else stream
        for table in stream.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
            for first in range(0, table.num_rows, TABLE_ROWS_AT_ONCE):
                yield table.slice(first, TABLE_ROWS_AT_ONCE).to_pylist()
        return
    # A byte that is no UTF-8 becomes `\xNN`, which no JSON holds: the line counts as broken
    # instead of ending the file, and no text is changed unseen.
    text = {"encoding": "utf-8-sig", "encoding_errors": "backslashreplace"}
    whole = {"sample_by": "document"} if kind == ARRAY else {}
    stream = datasets.load_dataset("text", **common, **text, **whole)
    for table in stream.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
        for column in table.columns:
            lines = column.to_pylist()
            yield parse_json(lines[0]) if kind == ARRAY else lines


@cache
def _cache_folder() -> str:
    """Where the builders leave their lock files, gone when this process ends: the user's own may not be
    writable.
    """
    folder = Path(tempfile.gettempdir()) / f"eyas-{os.getpid()}-{secrets.token_hex(8)}"
    # Before it is made: an interrupt may come between any two steps.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return str(folder)


def _datasets() -> Any:
    """The `datasets` library, imported late (a second), silent and offline."""
    os.environ["HF_DATASETS_OFFLINE"] = "1"  # of this library alone: a tokenizer may still be fetched
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    return datasets
