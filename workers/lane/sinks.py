"""Looks every few seconds which nodes have a living sink, so that states are left where one reads them."""

import time

from redis import Redis

from workers.board.processes import anyone_listening
from workers.sglang.passing import Passing

EVERY_S = 5.0
"""Between two looks; a sink that died is in Redis for 15 s anyway, and its node is given up after 120."""


class Sinks:
    """What one lane process knows of the sinks."""

    def __init__(self, redis: Redis, passing: Passing) -> None:
        self._redis, self._passing = redis, passing
        self._looked: float | None = None

    def look(self) -> None:
        """Look, if it is time to; raises what Redis' client raises."""
        now = time.monotonic()
        if self._looked is None or now - self._looked >= EVERY_S:
            self._passing.sinks = anyone_listening(self._redis).sink_nodes
            self._looked = now
