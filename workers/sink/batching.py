"""When a sink commits: results collected until they are many, big or old enough, or nothing more comes.

Only collects and decides; committing is `commit.py`, and Celery's side is `step.py`. Responses
and dead letters are small and captures wait for them, so they are committed early; states wait
until a segment is worth its files. Every constant of batching is here.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.broker.messages import Result
from workers.sink.refusals import states_of

BATCH_BYTES = 1_000_000_000
"""States in one batch, at most; one that is bigger is a batch of its own."""
BATCH_MESSAGES = 1000
"""Messages in one batch, at most."""
PREFETCH = 4 * BATCH_MESSAGES
"""Messages a sink takes from Redis before it must acknowledge some: two batches of each pile."""
HELD_BYTES = 128_000_000
"""Message bytes a sink holds before it takes no more; it may take some more until it looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long one pile may wait, seconds."""

    idle_s: float
    """Since its last message."""
    least_s: float
    """Since its first message, when the sink has just begun to be busy."""
    most_s: float
    """Since its first message, in the long run."""

    def age_s(self, busy_s: float) -> float:
        """How old the pile may get: a tenth of the time that the sink has been busy.

        So a small job is stored as it goes, and a job of a day does not end in a hundred
        thousand segments.
        """
        return min(self.most_s, max(self.least_s, busy_s / 10))


SMALL = Patience(idle_s=1.0, least_s=1.0, most_s=30.0)
"""Of responses and dead letters."""
STATES = Patience(idle_s=2.0, least_s=2.0, most_s=60.0)
"""Of states."""
BUSY_GAP_S = 10.0
"""A sink without messages for so long begins anew to be busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A result that was received and is neither committed nor acknowledged."""

    result: Result
    message_bytes: int
    """Bytes of the message as received."""
    delivery: Any = None
    """What the broker's side needs to acknowledge it; this file does not look inside."""


class Pile:
    """Results of one sort, in the order they came."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._held: list[Held] = []
        self._size_bytes = 0
        self._first = self._last = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Held, now: float) -> None:
        """Put one on the pile."""
        if not self._held:
            self._first = now
        self._last = now
        self._held.append(held)
        self._size_bytes += _state_bytes(held)

    def due_in(self, now: float, busy_s: float) -> float:
        """Seconds until it is to be committed, 0 when it is now; infinite when it is empty."""
        if not self._held:
            return float("inf")
        if self._size_bytes >= BATCH_BYTES or len(self._held) >= BATCH_MESSAGES:
            return 0.0
        ripe = min(self._first + self._patience.age_s(busy_s), self._last + self._patience.idle_s)
        return max(0.0, ripe - now)

    def take(self, now: float) -> list[Held]:
        """The first of it, as much as one batch may hold, and at least one if there is any."""
        taken: list[Held] = []
        size = 0
        for held in self._held[:BATCH_MESSAGES]:
            size += _state_bytes(held)
            if taken and size > BATCH_BYTES:
                break
            taken.append(held)
        self._held = self._held[len(taken) :]
        self._size_bytes = sum(map(_state_bytes, self._held))
        self._first = now
        return taken

    def drop(self) -> list[Held]:
        """Everything on the pile, which is empty then."""
        dropped, self._held, self._size_bytes = self._held, [], 0
        return dropped


class Batcher:
    """What a sink holds. Results are added by one thread and taken in batches by another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._small, self._states = Pile(SMALL), Pile(STATES)
        self._busy_since = self._last = float("-inf")
        self._taken = 0
        self._held_bytes = 0

    def add(self, held: Held) -> None:
        """Hold one more."""
        with self._changed:
            now = self._clock()
            if now - self._last > BUSY_GAP_S:
                self._busy_since = now
            self._last = now
            pile = self._small if states_of(held.result) is None else self._states
            pile.add(held, now)
            self._held_bytes += held.message_bytes
            self._changed.notify()

    def take(self, at_most_s: float) -> list[Held]:
        """The next batch that is due, waited for so long; empty when none is.

        States bring the small results along: their commit takes longest, and a response with
        inline states must not be overtaken. `done` is to be called when the batch is settled.
        """
        with self._changed:
            deadline = self._clock() + at_most_s
            while True:
                now = self._clock()
                busy_s = now - self._busy_since
                states_in = self._states.due_in(now, busy_s)
                small_in = self._small.due_in(now, busy_s)
                if min(states_in, small_in) <= 0:
                    break
                if now >= deadline:
                    return []
                self._changed.wait(min(states_in, small_in, deadline - now))
            batch = self._small.take(now)
            if states_in <= 0:
                batch += self._states.take(now)
            self._taken = len(batch)
            return batch

    def done(self, batch: list[Held]) -> None:
        """The batch is settled, one way or the other."""
        with self._changed:
            self._taken = 0
            self._held_bytes -= sum(held.message_bytes for held in batch)

    def drop(self) -> list[Held]:
        """Everything that is held and not taken; nothing is held of it any more."""
        with self._changed:
            dropped = self._small.drop() + self._states.drop()
            self._held_bytes -= sum(held.message_bytes for held in dropped)
            return dropped

    @property
    def has_room(self) -> bool:
        """Whether more may be received."""
        return self._held_bytes < HELD_BYTES

    def __len__(self) -> int:
        """Results held, those being committed included."""
        return len(self._small) + len(self._states) + self._taken


def _state_bytes(held: Held) -> int:
    states = states_of(held.result)
    return states.spool.size_bytes if states else 0
