"""Time by Redis' clock, for the leases that lie in Redis.

kombu writes the time of its own process, and every process compares it with its own. With clocks a minute
apart each would take what the other holds; an order of a process that died with its clock an hour ahead
would wait for that hour. The monotonic clock fills in between two looks at Redis, and does not jump.
"""

import time

from redis import Redis


class RedisClock:
    """Seconds since 1970 as this Redis has them; until the first look, as this machine has them."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def now(self) -> float:
        """The time, from any thread."""
        ahead_s = self._ahead_s
        return time.time() if ahead_s is None else time.monotonic() + ahead_s

    def follow(self, redis: Redis) -> None:
        """Look at Redis' clock; raises `RedisError` when it is away."""
        asked = time.monotonic()
        seconds, microseconds = redis.time()
        # It was read somewhere between question and answer: the middle is at most half of that off.
        self._ahead_s = seconds + microseconds / 1e6 - (asked + time.monotonic()) / 2
