"""Which of our processes are alive, for programs that only look: `up`, its supervisor, `status`.

A Redis that does not answer is an answer here, never an exception of its client's.
"""

import redis

from workers.board import ProcessSnapshot, read_processes
from workers.connection import connect


def answers(url: str) -> bool:
    """Whether this Redis takes commands from us; False while it still loads its file."""
    try:
        with connect(url) as client:
            return bool(client.ping())
    except (redis.RedisError, OSError, ValueError):
        return False


def living(url: str) -> tuple[ProcessSnapshot, ...]:
    """What the live processes say of themselves; empty when Redis does not answer."""
    try:
        with connect(url) as client:
            return read_processes(client)
    except (redis.RedisError, OSError, ValueError):
        return ()
