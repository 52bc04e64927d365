"""Names the first rows of a dataset that give no prompt; the others are only counted.

File and line, never the row's text.
"""

from collections.abc import Iterable

from producer.datasets.prompts import Skipped
from producer.talk import say

SHOWN = 3
"""Rows named per dataset."""


class SkippedRows:
    """The skipped rows of one dataset as they come."""

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self._left = SHOWN

    def show(self, rows: Iterable[Skipped]) -> None:
        """Say those that may still be named."""
        for row in rows:
            if not self._left:
                return
            self._left -= 1
            why = f" ({row.detail})" if row.detail else ""
            rest = "" if self._left else "; further ones are only counted"
            say(f"{self._dataset}: skipped {row.where}: {row.reason.value}{why}{rest}")
