"""How long a line, and how large an array, of a source may be: each is in memory whole while it is read.

Zipped files are looked into: a small one may hold any number of bytes. Reading them is `sources.py`'s.
"""

import gzip
import zlib
from pathlib import Path

from storage.errors import UsageError

LINES, ARRAY, PARQUET = "JSON lines", "a JSON array", "Parquet"
MOST_LINE_BYTES = 64 << 20
"""A row of a million token ids has a tenth of it."""
MOST_ARRAY_BYTES = 1 << 30
MOST_SHRUNK = 1032
"""How many bytes deflate makes at most of one."""
BLOCK_BYTES = 1 << 20


def check_size(
    file: Path, kind: str, *, most_bytes: int | None = None, block_bytes: int = BLOCK_BYTES
) -> None:
    """Raises `UsageError` naming the line, or the array, that is too large.

    What is damaged passes: it is said with its reason when it is read.
    """
    most = most_bytes or {LINES: MOST_LINE_BYTES, ARRAY: MOST_ARRAY_BYTES}.get(kind)
    if most is None:
        return
    zipped = file.suffix.lower() == ".gz"
    if file.stat().st_size * (MOST_SHRUNK if zipped else 1) <= most:
        return
    line, length = 1, 0
    try:
        with gzip.open(file) if zipped else file.open("rb", buffering=0) as opened:
            while block := opened.read(block_bytes):
                first = block.find(b"\n") if kind == LINES else -1
                length += len(block) if first < 0 else first
                if length > most:
                    raise _too_large(file, kind, line, most)
                if first >= 0:
                    line += block.count(b"\n")
                    # lines within a block are shorter than any bound; the last goes on in the next
                    length = len(block) - block.rfind(b"\n") - 1
    except (OSError, EOFError, zlib.error):
        return


def _too_large(file: Path, kind: str, line: int, most: int) -> UsageError:
    if kind == LINES:
        return UsageError(
            f"`{file}` line {line} is longer than `{most}` bytes",
            code="source.line",
            hint="write one JSON object a line; take that line out if it is one",
        )
    return UsageError(
        f"`{file}` is a JSON array of more than `{most}` bytes, which would be in memory whole",
        code="source.array",
        hint=f"write its rows as JSON lines: jq -c '.[]' {file.name} > {file.stem}.jsonl",
    )
