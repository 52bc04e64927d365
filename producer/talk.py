"""What a command says while it works: a bar on a terminal, one `key=value` line every few seconds otherwise.

Everything here goes to stderr, unbuffered; what a command reports is data and goes to stdout by its own
hand. What a run's board looks like is in `status_table.py`.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_EVERY_S = 3.0
"""Pause between two lines where there is no terminal: often enough to see it live, rare enough to read."""

Fact = str | int | float


def say(text: str = "") -> None:
    """One line of talk, out at once."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def line(event: str, facts: Mapping[str, Fact]) -> str:
    """`event key=value …`, values with spaces in quotes."""
    return " ".join([event, *(f"{key}={_value(value)}" for key, value in facts.items())])


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether a person looks at this stream (stderr unless given) as it is written."""
    stream = stream or sys.stderr
    return stream.isatty()


class Progress:
    """How far one piece of work is. Made by `progress`."""

    def __init__(self, event: str, total: int | None, facts: Mapping[str, Fact]) -> None:
        self._event = event
        self._facts: dict[str, Fact] = dict(facts)
        self._total = total
        self._done = 0
        self._started = time.monotonic()

    def advance(self, by: int = 1, **facts: Fact) -> None:
        """`by` more are done; `facts` replace those of the same name."""
        self._done += by
        self._facts |= facts
        self._show()

    def update(self, done: int, *, total: int | None = None, **facts: Fact) -> None:
        """So many are done in all, of `total` when that is known by now."""
        self._done = done
        self._total = total if total is not None else self._total
        self._facts |= facts
        self._show()

    def _show(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    def _said(self) -> dict[str, Fact]:
        elapsed_s = time.monotonic() - self._started
        said = dict(self._facts) | {"done": self._done}
        if self._total is not None:
            said["total"] = self._total
        if self._done and elapsed_s > 0:
            said["per_s"] = round(self._done / elapsed_s, 1)
        return said | {"elapsed_s": round(elapsed_s, 1)}


class _Lines(Progress):
    """Lines at the start, every few seconds, and at the end."""

    def __init__(
        self, event: str, total: int | None, facts: Mapping[str, Fact], write: Callable[[str], None]
    ) -> None:
        super().__init__(event, total, facts)
        self._write = write
        self._next = 0.0
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_EVERY_S
            self._write(line(self._event, self._said()))

    def _finish(self) -> None:
        self._write(line(self._event, self._said() | {"state": "done"}))


class _Bar(Progress):
    """A bar that redraws itself."""

    def __init__(
        self, event: str, total: int | None, facts: Mapping[str, Fact], rich: "RichProgress"
    ) -> None:
        super().__init__(event, total, facts)
        self._rich = rich
        self._task: TaskID = rich.add_task(event, total=total, facts=_shown(facts))

    def _show(self) -> None:
        self._rich.update(self._task, completed=self._done, total=self._total, facts=_shown(self._facts))

    def _finish(self) -> None:
        self._total = self._done if self._total is None else self._total
        self._show()
        self._rich.refresh()


@contextmanager
def progress(event: str, *, total: int | None = None, **facts: Fact) -> Iterator[Progress]:
    """Shows how far one piece of work is, for as long as the block runs.

    `with progress("tokenize", dataset="B1") as bar: bar.advance(500, tokens=…)`. The first words are out
    before the block begins; an exception passes through and leaves the last state seen.
    """
    if not is_terminal():
        lines = _Lines(event, total, facts, say)
        yield lines
        lines._finish()
        return
    # rich takes a tenth of a second to import: only where there is a terminal to draw on
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as rich:
        bar = _Bar(event, total, facts, rich)
        yield bar
        bar._finish()


def _shown(facts: Mapping[str, Fact]) -> str:
    return " · ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in facts.values())


def _value(value: Fact) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f'"{text}"' if " " in text or not text else text
