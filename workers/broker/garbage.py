"""Where messages go that are none: a bounded list in Redis, for a person to look at.

`redis-cli lrange eyas:garbage 0 -1` shows them, newest first. Nothing reads them back.
"""

import contextlib
import logging

from kombu import compression
from redis import Redis, RedisError

from workers.broker.keys import GARBAGE

logger = logging.getLogger(__name__)

KEPT = 100
"""Messages kept; older ones go."""
KEPT_BYTES = 65_536
"""Of each message; a longer one is cut."""


def refuse_compressed() -> None:
    """Let no message be unpacked by what its own header says: a megabyte might become a thousand.

    kombu does that before anybody can look at the message. Our token ids are packed inside, bounded.
    """
    for kind in compression.encoders():
        compression.register(_refuse, _refuse, kind)


def _refuse(body: object) -> bytes:
    raise ValueError("a compressed message")


def set_aside(redis: Redis, body: bytes, why: str) -> None:
    """Keep the message; when Redis is away it is only logged, since it has no value."""
    logger.warning("garbage.aside bytes=%d why=%r", len(body), why)
    with contextlib.suppress(RedisError, OSError):
        pipe = redis.pipeline()
        pipe.lpush(GARBAGE, body[:KEPT_BYTES])
        pipe.ltrim(GARBAGE, 0, KEPT - 1)
        pipe.execute()
