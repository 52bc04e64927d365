"""The lease on messages this process holds: renewed, so that only a dead process loses them.

kombu records when it received a message in the sorted set `unacked_index` and gives it to another
process once that is `visibility_timeout` ago, running or not. Renewing the times of what is held
makes a short timeout safe for calls of any length.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from redis import Redis, RedisError

from workers.broker.keys import UNACKED_INDEX
from workers.broker.kombu_private import tell_time, unsettled
from workers.broker.redis_clock import RedisClock

logger = logging.getLogger(__name__)

AHEAD_S = 10.0
"""A lease that began so far in the future is of a clock that was wrong: it counts from now."""


class Lease:
    """Renews what one process holds, from a thread of its own: Celery's may be busy or waiting."""

    def __init__(self, redis: Redis, renew_s: float) -> None:
        self._redis = redis
        self._renew_s = renew_s
        self._clock = RedisClock()
        self._qos: Any = None
        self._carried: Sequence[str] = ()
        self._thread: threading.Thread | None = None

    def watch(self, qos: Any) -> None:
        """Renew what this kombu `QoS` holds from now on; a reconnect brings another."""
        self._qos, self._carried = qos, ()
        tell_time(self._clock.now)
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew_on, name="lease", daemon=True)
            self._thread.start()

    def keep(self, tags: Sequence[str]) -> None:
        """Renew these too until the next `watch`: their connection is lost, their orders run."""
        self._carried = tags

    def held(self) -> Sequence[str]:
        """Delivery tags of the messages that are neither acknowledged nor given back."""
        qos = self._qos
        if qos is None:
            return ()
        return [*self._carried, *unsettled(qos)]

    def renew(self) -> int:
        """Renew now; how many messages are held.

        Only times that are there are set (`XX`): a message that was acknowledged meanwhile must
        not come back.
        """
        self._clock.follow(self._redis)
        now, tags = self._clock.now(), self.held()
        wrong = self._redis.zrangebyscore(UNACKED_INDEX, now + AHEAD_S, "+inf")
        if renewed := dict.fromkeys([*tags, *wrong], now):
            self._redis.zadd(UNACKED_INDEX, renewed, xx=True)
        return len(tags)

    def _renew_on(self) -> None:
        waiting = False
        while True:
            try:
                self.renew()
                waiting = False
            except (RedisError, OSError) as error:
                if not waiting:
                    logger.warning("lease.waiting error=%r", str(error))
                waiting = True
            # The edge of the thread: without it every message would run again and again.
            except Exception:
                logger.exception("lease failed")
            time.sleep(self._renew_s)
