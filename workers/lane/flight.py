"""Single flight: an order that is being worked on is not begun again by a second delivery of it.

Redis delivers a message again when its lease or its connection was lost, and a batch of uncertain
delivery is sent again. Within one process such a duplicate waits for the first delivery and is
acknowledged once that one's result is published. Two processes may still both run it; the store
keeps one. This file knows neither Celery nor Redis.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto

REMEMBERED = 20_000
"""Publications remembered as done: more than a window of messages."""


class Arrival(Enum):
    """What to do with a delivery."""

    FIRST = auto()
    """Run it."""
    WAITS = auto()
    """Keep it: its `settle` is called when the one that runs has ended."""
    DONE = auto()
    """Acknowledge it: its result was published."""


class Flight:
    """Which orders this process is working on, and which publications it has done lately.

    An order is named by what is to be done (`key`), a publication by the one act of putting it in
    the queue. A done publication that is delivered again is a duplicate; the same order published
    anew is not: the feeder wants it done again, because its result was lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: dict[str, list[Callable[[bool], None]]] = {}
        self._done: OrderedDict[str, None] = OrderedDict()

    def arrive(self, key: str, publication: str, settle: Callable[[bool], None]) -> Arrival:
        """Note a delivery; a `FIRST` must be ended with `finish`.

        `settle` of one that waits is called once, with whether the first published its result.
        """
        with self._lock:
            if publication in self._done:
                return Arrival.DONE
            waiting = self._flying.get(key)
            if waiting is None:
                self._flying[key] = []
                return Arrival.FIRST
            waiting.append(settle)
            return Arrival.WAITS

    def flies(self, key: str) -> bool:
        """Whether the order is being worked on."""
        with self._lock:
            return key in self._flying

    def has_done(self, publication: str) -> bool:
        """Whether its result was published, as far as is remembered."""
        with self._lock:
            return publication in self._done

    def finish(self, key: str, publication: str, *, published: bool) -> int:
        """End a first delivery and settle those that waited for it; how many these were."""
        with self._lock:
            waiting = self._flying.pop(key, [])
            if published:
                self._done[publication] = None
                while len(self._done) > REMEMBERED:
                    self._done.popitem(last=False)
        for settle in waiting:
            settle(published)
        return len(waiting)
