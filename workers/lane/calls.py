"""Calls in flight of one process: how many at which server, and whether another may begin.

A call takes the healthy server with the most free slots. Grants come from `slots.py`, health from
`servers.py`; this file only counts, and knows neither Redis nor HTTP.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

OUTAGE_S = 2.0
"""Calls that fail within this of the first are one outage: they were in flight together."""
CALM_S = 60.0
"""A server that holds out so long after an outage starts the next one's count anew."""
RAMP_S = 0.5
"""In which the calls allowed to a server that was lost double, from one; twice that again with
each outage that follows soon. One that answers its probe but no call would otherwise send all of
a lane's orders round through the queue, again and again."""
LONGEST_RAMP_S = 30.0


@dataclass(slots=True)
class _Outage:
    at: float
    repeats: int = 0


class Calls:
    """The count, kept by the threads of a process that make calls."""

    def __init__(
        self, capacity: int, healthy: Callable[[], Iterable[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`capacity` is the process's `-c`; `healthy` gives the servers that take calls now."""
        self.capacity = capacity
        self._healthy = healthy
        self._clock = clock
        self._lock = threading.Lock()
        self._in_flight: Counter[str] = Counter()
        self._apart = 0
        self._grants: dict[str, int] = {}
        self._good_until = 0.0
        self._outages: dict[str, _Outage] = {}

    def grant(self, grants: Mapping[str, int], good_s: float) -> None:
        """Use these slots from now on, and none once they are that old without being renewed."""
        with self._lock:
            self._grants = dict(grants)
            self._good_until = self._clock() + good_s

    def take(self) -> str | None:
        """The server to call, counted as called until `give_back`; None when none has a free slot."""
        with self._lock:
            free = self._free()
            url = max(free, key=lambda each: free[each], default=None)
            if url is None or free[url] < 1:
                return None
            self._in_flight[url] += 1
            return url

    @contextmanager
    def waiting_apart(self) -> Iterator[None]:
        """Meanwhile one order of this process waits for a server that slots have no part in."""
        with self._lock:
            self._apart += 1
        try:
            yield
        finally:
            with self._lock:
                self._apart -= 1

    def take_apart(self, url: str) -> None:
        """Count a call that was let in without a slot, until `give_back`."""
        with self._lock:
            self._in_flight[url] += 1

    def give_back(self, url: str) -> None:
        """The call has ended."""
        with self._lock:
            self._in_flight[url] -= 1

    def lost(self, url: str) -> None:
        """The call ended because its server went away."""
        with self._lock:
            now, outage = self._clock(), self._outages.get(url)
            if outage is None or now - outage.at > CALM_S:
                self._outages[url] = _Outage(at=now)
            elif now - outage.at > OUTAGE_S:
                outage.at, outage.repeats = now, outage.repeats + 1

    def room(self, reserved: int) -> int:
        """How many more orders may be taken, when the process holds `reserved` unfinished ones.

        Those that hold an order but no server yet will each take a slot; those that have ended
        their call and not their order count as such too, which is the safe side.
        """
        with self._lock:
            pending = max(0, reserved - self._in_flight.total() - self._apart)
            free = sum(each for each in self._free().values() if each > 0)
        return min(free - pending, self.capacity - reserved)

    def in_flight(self) -> dict[str, int]:
        """URL → calls in flight, where there are any."""
        with self._lock:
            return {url: count for url, count in self._in_flight.items() if count}

    def grants(self) -> dict[str, int]:
        """URL → slots."""
        with self._lock:
            return dict(self._grants) if self._clock() < self._good_until else {}

    def _free(self) -> dict[str, int]:
        """URL → slots not in use, for the healthy; negative where the grant was lowered."""
        now = self._clock()
        if now >= self._good_until:
            return {}
        return {
            url: min(self._grants.get(url, 0), self._allowed(url, now)) - self._in_flight[url]
            for url in self._healthy()
        }

    def _allowed(self, url: str, now: float) -> int:
        outage = self._outages.get(url)
        if outage is None:
            return self.capacity
        # The exponents are bounded: after a day of outages, or hours after one, these would be
        # numbers that no float holds.
        ramp_s = min(LONGEST_RAMP_S, RAMP_S * 2.0 ** min(30, outage.repeats))
        return min(self.capacity, int(2.0 ** min(30.0, (now - outage.at) / ramp_s)))
