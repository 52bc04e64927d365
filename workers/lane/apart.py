"""Where one suspect is run, and how many more of them a process takes: `marks.py` says who is one.

Suspects of one server's death lie together in the queue, since their calls went back to it at once,
and none of them needs a slot. So a process that has one takes more of them while its lane has no
slots, until it meets an order that is none.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from workers.lane.alone import Alone, NotAloneError
from workers.lane.calls import Calls
from workers.lane.marks import Mark

NO_MORE_S = 2.0
"""After an order that is no suspect, none is looked for during this time."""


@dataclass(slots=True)
class Apart:
    """The suspects of one lane process."""

    alone: Alone
    calls: Calls
    healthy: Callable[[], Iterable[str]]
    """The servers that take calls now."""
    limit: Callable[[], int]
    """Calls the lane may have in flight at one server."""
    stopping: Callable[[], bool]
    """Whether the process takes no more orders."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _companies: list[int] = field(default_factory=list)
    """That of each suspect which this process has."""
    _looks_from: float = 0.0

    @contextmanager
    def place(self, mark: Mark) -> Iterator[str]:
        """The server to call, and nothing but the suspect's company is in flight there meanwhile.

        Waits in the calling thread. Raises `NotAloneError` when no server takes calls, the lane is
        paused or the process ends.
        """
        company = max(1, min(mark.company, self.limit()))
        with self._lock:
            self._companies.append(company)
        try:
            url = self._choose()
            with ExitStack() as place:
                with self.calls.waiting_apart():
                    there = self.alone.at(url, company=company, why_not=lambda: self._why_not(url))
                    place.enter_context(there)
                self.calls.take_apart(url)
                place.callback(self.calls.give_back, url)
                yield url
        finally:
            with self._lock:
                self._companies.remove(company)

    def met_another(self) -> None:
        """An order was taken that is no suspect, and there was no slot for it."""
        self._looks_from = time.monotonic() + NO_MORE_S

    def room(self, reserved: int) -> int:
        """How many more suspects may be taken, by a process that holds so many unfinished orders."""
        with self._lock:
            if not self._companies or time.monotonic() < self._looks_from:
                return 0
            wanted = max(self._companies) - len(self._companies)
        return min(wanted, self.calls.capacity - reserved)

    def _choose(self) -> str:
        """One where this process has suspects already, else the one it has the least in flight at."""
        healthy = tuple(self.healthy())
        if not healthy:
            raise NotAloneError("no server takes calls")
        claimed, flying = self.alone.claimed(), self.calls.in_flight()
        return min(healthy, key=lambda url: (url not in claimed, flying.get(url, 0)))

    def _why_not(self, url: str) -> str:
        if self.stopping():
            return "stopping"
        if url not in tuple(self.healthy()):
            return "the server takes no calls"
        return "" if self.limit() else "the lane is paused"
