"""Waking the feeder early: a one-element list in Redis that it waits on between its steps.

Only a hint: the feeder looks once a second anyway, so a lost wake-up costs a second.
"""

import contextlib

from redis import Redis, RedisError

from workers.broker.keys import WAKE

FORGET_S = 60


def wake_feeder(redis: Redis) -> None:
    """Let whoever feeds look now; harmless when nobody does."""
    with contextlib.suppress(RedisError, OSError):
        pipe = redis.pipeline()
        pipe.lpush(WAKE, b"1")
        pipe.ltrim(WAKE, 0, 0)
        pipe.expire(WAKE, FORGET_S)
        pipe.execute()


def wait_for_wake(redis: Redis, at_most_s: float) -> bool:
    """Wait until woken, or so long; whether it was woken.

    Raises `RedisError` when Redis is away.
    """
    return redis.blpop([WAKE], timeout=at_most_s) is not None
