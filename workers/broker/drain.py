"""Ending a process on a signal: nothing new, a while for what runs, then back into the queue.

Celery's warm shutdown waits for ten-minute calls, and while it waits nobody acknowledges what has
ended. Here Celery goes on running meanwhile and is only told to stop once nothing is held:

    first SIGTERM or SIGINT   take nothing more; calls may end within the grace, then are cancelled
    second, or SIGQUIT        cancel now
    third                     end now; Redis gives the messages to others when their lease is old

However it goes, the process is gone when `grace_s` and `exit_s` are over: a thread that waits for a
Redis that is away, or a commit on a slow disk, would keep it for as long as that takes.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from celery.worker import state

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
LOOK_S = 0.02
"""How often is looked whether everything has ended."""


class Work(Protocol):
    """What a process does, as far as ending it goes."""

    def drain(self) -> None:
        """Take nothing new."""

    def cancel(self) -> int:
        """Give back what is being done; how much that is."""


class Drain:
    """Ends one process, at most once."""

    def __init__(
        self,
        work: Work,
        held: Callable[[], int],
        wake: Callable[[], object],
        *,
        grace_s: float,
        exit_s: float,
    ) -> None:
        """`held` counts unsettled messages; `wake` makes Celery look at what it was told."""
        self._work, self._held, self._wake = work, held, wake
        self._grace_s, self._exit_s = grace_s, exit_s
        self._told = 0
        self._hurry = threading.Event()

    def install(self) -> None:
        """Take over the signals; called from the main thread, after Celery took them."""
        for each in SIGNALS:
            signal.signal(each, self._on_signal)

    def finish_now(self) -> bool:
        """End what runs, where no signal began it; whether that was so.

        For `celery control shutdown`, where Celery would wait for calls however long they take.
        """
        if self._told:
            return False
        self._told = 1
        self._end_in(self._grace_s + self._exit_s)
        self._work.drain()
        self._wait_until_idle(self._grace_s, lambda: len(state.reserved_requests))
        self._work.cancel()
        self._wait_until_idle(self._exit_s, lambda: len(state.reserved_requests))
        return True

    def _on_signal(self, number: int, frame: Any) -> None:
        self._told += 1
        if self._told >= 3:
            os._exit(1)
        if self._told == 2 or number == signal.SIGQUIT:
            self._hurry.set()
            self._end_in(self._exit_s)
        if self._told == 1:
            self._end_in(self._grace_s + self._exit_s)
            threading.Thread(target=self._drain, name="drain", daemon=True).start()

    def _drain(self) -> None:
        logger.info("drain.begun in_flight=%d grace_s=%g", len(state.reserved_requests), self._grace_s)
        self._work.drain()
        self._wait_until_idle(self._grace_s, lambda: len(state.reserved_requests))
        cancelled = self._work.cancel()
        # Acknowledged and given back by Celery's loop, which still runs: stopping it first would
        # give back what has ended, to be run again.
        self._hurry.clear()
        self._wait_until_idle(self._exit_s, lambda: len(state.reserved_requests) + self._held())
        logger.info("drain.done cancelled=%d held=%d", cancelled, self._held())
        state.should_stop = os.EX_OK
        self._wake()

    def _wait_until_idle(self, at_most_s: float, busy: Callable[[], int]) -> None:
        deadline = time.monotonic() + at_most_s
        while time.monotonic() < deadline and not self._hurry.is_set() and busy():
            time.sleep(LOOK_S)

    def _end_in(self, seconds: float) -> None:
        """End anyway; what is not given back then is given to others when its lease is old."""
        timer = threading.Timer(seconds, os._exit, args=(os.EX_OK,))
        timer.daemon = True
        timer.start()
