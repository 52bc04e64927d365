"""Progress of a long command on stderr: one line that is rewritten on a terminal, else a
`key=value` line every few seconds, the first at once. Never on stdout, which is data.
"""

import sys
import time
from types import TracebackType
from typing import TextIO

EVERY_S = 2.0
ON_TERMINAL_S = 0.2


class Progress:
    """Says how far a command has come; a context manager that leaves a whole last line."""

    def __init__(self, event: str, stream: TextIO | None = None) -> None:
        self._event = event
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._next = 0.0
        self._line = self._printed = ""
        self.say()

    def say(self, **values: object) -> None:
        """Print these values, if it is time; `segments=3/24` and the like."""
        self._line = " ".join([self._event, *(f"{name}={value}" for name, value in values.items())])
        if time.monotonic() >= self._next:
            self._print()

    def _print(self) -> None:
        self._next = time.monotonic() + (ON_TERMINAL_S if self._terminal else EVERY_S)
        self._stream.write(f"\r\x1b[K{self._line}" if self._terminal else f"{self._line}\n")
        self._stream.flush()
        self._printed = self._line

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line != self._printed:
            self._print()
        if self._terminal:
            self._stream.write("\n")
            self._stream.flush()
