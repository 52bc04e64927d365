"""How samples are kept: runs, prompts, samples, the spool, segments, the store and its checks.

`storage.open(path)` reads a store. Imports nothing by itself: `storage.spool` also runs inside
SGLang, whose environment has NumPy and nothing else of what the store needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from storage.reader import Samples


def open(path: str | Path, capture: str | None = None) -> Samples:  # noqa: A001 - `storage.open(path)` reads as it should
    """The samples stored in this folder, for reading.

    `capture` names the folder under `states/`; by default it is the run's own. Raises
    `storage.errors.UnavailableError` when there is no run.
    """
    from storage.reader import Samples

    return Samples(path, capture)
