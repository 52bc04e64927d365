"""Bounds on a chat template, which is a program that came with somebody's model.

transformers renders it in Jinja's immutable sandbox, which keeps it from Python's own objects; what is
here keeps it from the machine's time and memory. What is rendered is `template.py`'s.
"""

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

RENDER_S = 10.0
"""CPU seconds of one conversation; the longest real ones take hundredths."""
AGAIN_S = 1.0
"""The end of the time is said again until it is heard: a library may catch it on its way."""
RENDER_BYTES = 2 << 30
"""Memory that one conversation may take besides what the process has."""
MOST_CHARACTERS = 64 << 20
"""Of what a template makes of one conversation."""
TEMPLATE_CHARACTERS = 1 << 20
"""Of a template; the longest real ones have 30 000."""
LOOK_S = 1.0
"""How old the known size of the process may be: looking takes as long as half a rendering."""


class TimeUpError(Exception):
    """A template took longer than `RENDER_S`."""


def why_unsafe(template: str) -> str | None:
    """Why this template may not be run at all; None when it may.

    Powers alone run inside Python's integers, where no clock stops them, and no chat needs one.
    """
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block that transformers adds to Jinja: looked at as what is inside it."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    if len(template) > TEMPLATE_CHARACTERS:
        return f"it is `{len(template)}` characters long"
    try:
        extensions = [Generation, "jinja2.ext.loopcontrols"]
        tree = ImmutableSandboxedEnvironment(extensions=extensions).parse(template)
    except RecursionError:
        return "it is nested too deep"
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return "it raises numbers to a power" if tree.find(nodes.Pow) else None


class Bounds:
    """The bounds of one thread's renderings."""

    def __init__(self, render_s: float = RENDER_S) -> None:
        self.render_s = render_s
        self._size_bytes = 0
        self._looked = -LOOK_S

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps what runs inside to its time and memory: `TimeUpError` and `MemoryError`.

        Only the main thread can be interrupted; elsewhere time is not bounded.
        """
        main = threading.current_thread() is threading.main_thread()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = self._process_bytes() + RENDER_BYTES
        if main:
            before = signal.signal(signal.SIGVTALRM, self._time_up)
            signal.setitimer(signal.ITIMER_VIRTUAL, self.render_s, AGAIN_S)
        try:
            with suppress(ValueError, OSError):  # a lower one is set already, or the system knows none
                if soft == resource.RLIM_INFINITY or limit < soft:
                    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
            yield
        finally:
            if main:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                signal.signal(signal.SIGVTALRM, before)
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def _process_bytes(self) -> int:
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            with suppress(OSError):  # no /proc here: what was there at least is what was used
                pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
                self._size_bytes = pages * resource.getpagesize()
        return self._size_bytes or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _time_up(self, number: int, frame: FrameType | None) -> None:
        raise TimeUpError(f"it takes longer than {self.render_s:g} s")
