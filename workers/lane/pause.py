"""A pause of a whole lane process, because its machine failed an order: a full spool for one.

Whether there is room again is asked by whoever looks (`lane.py`); this only keeps the time.
"""

import threading
import time
from collections.abc import Callable

FIRST_S = 2.0
LONGEST_S = 30.0


class Pause:
    """Runs out by itself, after twice as long each time, until an order has succeeded in between.

    It may be the spool of another machine that is full, which only the next order can tell.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until = 0.0
        self._repeats = 0
        self._why = ""

    @property
    def on(self) -> bool:
        """Whether nothing may be taken now."""
        return self._clock() < self._until

    @property
    def why(self) -> str:
        """The reason, as long as it may last; empty when all is well."""
        return self._why

    def begin(self, why: str) -> None:
        """An order failed for this reason; those that run beside it fail of the same pause."""
        with self._lock:
            self._why = why
            if not self.on:
                # Bounded: after a night of pauses it would be a number that no float holds.
                self._until = self._clock() + min(LONGEST_S, FIRST_S * 2.0 ** min(30, self._repeats))
                self._repeats += 1

    def go_on(self) -> None:
        """The reason is seen to last."""
        with self._lock:
            self._until = max(self._until, self._clock() + FIRST_S)

    def clear(self) -> None:
        """The reason is seen to be over."""
        with self._lock:
            self._why = ""

    def succeeded(self) -> None:
        """An order has succeeded: the next pause is a short one."""
        with self._lock:
            self._repeats = 0
