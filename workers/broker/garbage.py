"""Where messages go that are none: a bounded list in Redis, for a person to look at.

`redis-cli lrange eyas:garbage 0 -1` shows them, newest first. Nothing reads them back.
"""

import contextlib
import logging

from redis import Redis, RedisError

from workers.broker.keys import GARBAGE

logger = logging.getLogger(__name__)

KEPT = 100
"""Messages kept; older ones go."""
KEPT_BYTES = 65_536
"""Of each message; a longer one is cut."""


def set_aside(redis: Redis, body: bytes, why: str) -> None:
    """Keep the message; when Redis is away it is only logged, since it has no value."""
    logger.warning("garbage.aside bytes=%d why=%r", len(body), why)
    with contextlib.suppress(RedisError, OSError):
        pipe = redis.pipeline()
        pipe.lpush(GARBAGE, body[:KEPT_BYTES])
        pipe.ltrim(GARBAGE, 0, KEPT - 1)
        pipe.execute()
