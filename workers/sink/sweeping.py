"""Sweeping what is left behind: spool files nobody waits for, staging folders nobody writes,
segments that were merged into others a day ago.

When a Redis loses its data, the results that named spool files are gone and the files stay. They
would hold the spool full, and its lanes paused, for as long as the longest a file may wait; so
while no result waits for this node, files are swept much earlier, and soonest once the run is
finished: nothing is wanted any more. A file swept too early is captured again.
"""

import time
from collections.abc import Callable

from redis import Redis

from storage.spool import Spool
from storage.store import Store
from workers.board.processes import read_processes
from workers.broker.keys import WINDOW
from workers.broker.queues import SINK, sink_queue
from workers.runs import read_carried

EVERY_S = 600.0
"""Between two sweeps."""
WAITED_FOR_S = 24 * 3600.0
"""Age of a spool file that waits for nobody although results wait: those are of younger ones."""
IDLE_S = 3600.0
"""Age of a spool file that waits for nobody when on two looks in a row no result waits."""
STAGING_S = 24 * 3600.0
"""Age of a staging folder that no writer will come back to."""
LOOK_S = 5.0
"""Between two looks at whether the run is finished."""


class Sweeper:
    """Sweeps one node's spool and one store, now and then."""

    def __init__(
        self,
        redis: Redis,
        spool: Spool,
        clock: Callable[[], float] = time.monotonic,
        *,
        settle_s: float = 60.0,
    ) -> None:
        """`settle_s`: age of what is swept once the run is finished."""
        self._redis, self._spool, self._clock, self._settle_s = redis, spool, clock, settle_s
        self._swept: float | None = None
        self._looked = float("-inf")
        self._was_idle = False

    def look(self, store: Store | None) -> None:
        """Sweep if it is time to; raises `RedisError`, `OSError` and `EyasError`."""
        now = self._clock()
        if store is not None and now - self._looked >= min(LOOK_S, self._settle_s):
            self._looked = now
            if self._is_over(store):
                self._spool.sweep(self._settle_s)
                store.sweep_staging(self._settle_s)
        if self._swept is not None and now - self._swept < EVERY_S:
            return
        self._swept = now
        idle = self._is_idle()
        self._spool.sweep(IDLE_S if idle and self._was_idle else WAITED_FOR_S)
        self._was_idle = idle
        if store is not None:
            store.sweep_staging(STAGING_S)
            store.delete_replaced()

    def _is_over(self, store: Store) -> bool:
        """Whether the store's run is finished, and nothing of it is out that a file could belong to."""
        carried = read_carried(self._redis)
        return (
            carried is not None
            and carried.finished
            and carried.run.id == store.run.id
            and not self._redis.hlen(WINDOW)
            and self._is_idle()
        )

    def _is_idle(self) -> bool:
        """Whether no result waits for a sink of this node, and none of them holds any."""
        node = self._spool.node
        return not self._redis.llen(sink_queue(node)) and not any(
            p.in_flight for p in read_processes(self._redis) if p.lane == SINK and p.node == node
        )
