"""Orders that were lost on their way, and nodes that are gone: what the feeder publishes again.

Redis may lose a message (a worker that dies between taking it and noting that it has), and a node
may never come back with its spool. Nothing here remembers more than a few looks.
"""

import base64
import logging
import time
from collections.abc import Iterable

import msgpack
from redis import Redis, ResponseError

from storage.json_records import parse_json
from workers.broker.backlog import Backlog
from workers.broker.keys import WINDOW, dropped_key, window_field
from workers.broker.messages import Captured, Failed, MessageError, Responded, Result, decode
from workers.broker.queues import Lane, sink_queue

logger = logging.getLogger(__name__)

APART_S = 3.0
"""A lane has lost its orders when it is quiet on two looks so far apart and on all between."""
GONE_S = 120.0
"""A node of which no process has said anything for so long is gone."""
CHUNK = 500
DROPPED_S = 600
"""What a feeder that died while it dropped results leaves behind goes after this."""


class Quiet:
    """Since when each lane is quiet."""

    def __init__(self) -> None:
        self._since: dict[Lane, float] = {}

    def look(self, now: float, backlog: Backlog, *, progress: bool) -> set[Lane]:
        """Lanes whose orders, if any are out, are lost. `progress`: the store has grown since."""
        lost = set()
        for lane in Lane:
            if progress or not backlog.is_quiet(lane):
                self._since.pop(lane, None)
            elif now - self._since.setdefault(lane, now) >= APART_S:
                lost.add(lane)
        return lost

    def forget(self, lane: Lane) -> None:
        """Begin anew: its orders were just published."""
        self._since.pop(lane, None)


class GoneNodes:
    """Since when the nodes with waiting results are not heard of."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._absent_since: dict[str, float] = {}

    def look(self, now: float, backlog: Backlog, alive: Iterable[str]) -> int:
        """Drop the results that wait for nodes that are gone; how many were dropped.

        Their states lie in a spool nobody can reach. They leave the window, so that the feeder
        publishes their orders again.
        """
        waiting = {node for node, length in backlog.nodes.items() if length} - set(alive)
        self._absent_since = {node: self._absent_since.get(node, now) for node in waiting}
        dropped = 0
        for node, since in list(self._absent_since.items()):
            if now - since >= GONE_S:
                del self._absent_since[node]
                count = drop_results(self._redis, node)
                logger.warning("node.gone node=%s dropped=%d", node, count)
                dropped += count
        return dropped


def drop_results(redis: Redis, node: str) -> int:
    """Empty the queue of the node's sink and take its results out of the window; how many.

    The queue is moved away in one step: its sink, if it comes back now, has a message or we have
    it. A crash after that leaves orders in the window that reconciliation finds.
    """
    aside = dropped_key(node, time.time_ns())
    pipe = redis.pipeline()
    pipe.rename(sink_queue(node), aside)
    pipe.expire(aside, DROPPED_S)
    try:
        pipe.execute()
    except ResponseError:
        return 0  # empty: its sink has come back and taken them
    count = 0
    while raw := redis.lrange(aside, 0, CHUNK - 1):
        redis.ltrim(aside, len(raw), -1)
        fields = [field for each in raw for field in _fields(each)]
        count += len(raw)
        if fields:
            redis.hdel(WINDOW, *fields)
    redis.delete(aside)
    return count


def _fields(raw: bytes | str) -> list[bytes]:
    """The window's field of the order whose result this is; empty for what cannot be read."""
    result = _result(raw)
    match result:
        case Responded():
            return [window_field(result.response.id, "generate")]
        case Captured():
            return [window_field(result.states.id, "capture")]
        case Failed():
            return [window_field(result.failure.id, result.failure.stage)]
        case None:
            return []


def _result(raw: bytes | str) -> Result | None:
    """The result in a message as kombu keeps it in a list: JSON around msgpack in base 64."""
    try:
        (body,), _, _ = msgpack.unpackb(base64.b64decode(parse_json(raw)["body"]))
        message = decode(body)
    except (MessageError, ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, Result) else None
