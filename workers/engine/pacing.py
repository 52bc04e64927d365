"""Slots and time like a GPU server's: so many requests run at once, each at least so long.

A request holds its slot for its paced time even when its answer is ready, so that queueing, throughput
and time-outs of a client are those it would have in front of the server it stands in for.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from workers.engine.refusal import by_state


class Slots:
    """First come, first served; entering waits for a slot."""

    def __init__(self, slots: int, max_queued: int | None) -> None:
        self._free = asyncio.Semaphore(slots)
        self._slots = slots
        self._max_queued = max_queued
        self.entered = 0
        """Requests running or waiting."""

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a slot.

        Raises `Refusal` when too many wait already.
        """
        if self._max_queued is not None and self.entered >= self._slots + self._max_queued:
            raise by_state("The request queue is full.")
        self.entered += 1
        try:
            async with self._free:
                yield
        finally:
            self.entered -= 1


def due(started: float, tokens: int, ttft_s: float, tpot_s: float) -> float:
    """When the `tokens`-th token may be there, monotonic seconds."""
    return started + ttft_s + tpot_s * max(0, tokens - 1)


async def wait_until(moment: float, aborted: asyncio.Event) -> None:
    """Return at the moment, or at once when aborted."""
    left = moment - time.monotonic()
    if left > 0 and not aborted.is_set():
        try:
            await asyncio.wait_for(aborted.wait(), left)
        except TimeoutError:
            return
