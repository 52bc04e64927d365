"""The one form of every benchmark's result: a line for people, JSON for `python -m ops.bench`.

A row names what was measured, the figure, and what the design asks for; nothing here measures.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

SKIPPED = 77
"""Exit status of a benchmark that lacks what it measures; it has said what."""
MARK = "row "
"""Begins each line that holds a row, among whatever else a benchmark prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of the README's table."""

    what: str
    """What was measured, against what."""
    measured: float
    at_least: float | None = None
    """The figure to reach from below, if any."""
    at_most: float | None = None
    """The figure to stay under, if any."""
    unit: str = "×"
    """`×` for a ratio."""

    @property
    def reached(self) -> bool:
        """Whether the figure is what the design asks for; a row without a bound always is."""
        above = self.at_least is None or self.measured >= self.at_least
        return above and (self.at_most is None or self.measured <= self.at_most)

    def __str__(self) -> str:
        bound = f"≥ {self.at_least:g}" if self.at_least is not None else ""
        bound = f"≤ {self.at_most:g}" if self.at_most is not None else bound
        mark = "ok" if self.reached else "SHORT"
        figure = f"{self.what:<74} {self.measured:>9.3g} {self.unit:<8}"
        return f"{figure} {bound:<8} {mark}" if bound else figure.rstrip()


def print_rows(rows: Iterable[Row]) -> None:
    """Each row as one marked line of JSON."""
    for row in rows:
        print(MARK + json.dumps(asdict(row), ensure_ascii=False), flush=True)


def read_row(line: str) -> Row | None:
    """The row in a line of a benchmark's output, or None."""
    return Row(**json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None


def say(text: str) -> None:
    """One line of talk, on stderr."""
    print(text, file=sys.stderr, flush=True)
