"""What a lane process says of itself on the board: its counters, its servers, its spool.

It decides nothing, and writes nothing into Redis: the lane does, once a second (`lane.py`).
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from storage.spool import Spool
from workers.board.processes import ProcessSnapshot, ServerSnapshot
from workers.broker.queues import Lane


class Account:
    """The counters of one process, since it began."""

    def __init__(self, lane: Lane, name: str, node: str) -> None:
        self._lane, self._name, self._node = lane, name, node
        self._started = time.time()
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    def count(self, what: str, more: int = 1) -> None:
        """Add to a counter; from any thread."""
        with self._counting:
            self._counts[what] += more

    def snapshot(
        self,
        *,
        said: tuple[str, str],
        in_flight: Mapping[str, int],
        slots: Mapping[str, int],
        servers: Sequence[ServerSnapshot],
        spool: Spool,
    ) -> ProcessSnapshot:
        """The process at this moment: state and reason, calls in flight and slots by server."""
        state, says = said
        counts = self._counts
        return ProcessSnapshot(
            name=self._name,
            lane=self._lane,
            node=self._node,
            pid=os.getpid(),
            at=time.time(),
            started=self._started,
            state=state,
            says=says,
            in_flight=sum(in_flight.values()),
            servers=tuple(
                replace(server, slots=slots.get(server.url, 0), in_flight=in_flight.get(server.url, 0))
                for server in servers
            ),
            done=counts["done"],
            failed=counts["failed"],
            again=counts["again"],
            requeued=counts["requeued"],
            tokens=counts["tokens"],
            prompt_tokens=counts["prompt_tokens"],
            aside=counts["aside"],
            spool_bytes=spool.used_bytes(),
            spool_max_bytes=spool.max_bytes,
        )
