"""What waits in Redis: the length of each queue, and what processes hold unacknowledged.

Reads kombu's keys: a queue is a list of its name (one priority step), and `unacked` a hash of all
messages that were delivered and not acknowledged, whatever their queue.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from redis import Redis

from workers.broker.keys import UNACKED
from workers.broker.queues import SINK, all_queues, sink_queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """One look at the queues."""

    waiting: Mapping[str, int]
    """Queue → messages nobody has taken, for the lanes and `sink`."""
    nodes: Mapping[str, int]
    """Node → results that wait for the sink of that node."""
    unacked: int
    """Messages that some process holds, or held when it died."""

    @property
    def results(self) -> int:
        """Results that no sink has taken yet."""
        return self.waiting[SINK] + sum(self.nodes.values())

    def is_quiet(self, lane: str) -> bool:
        """Whether no order of this lane can be anywhere: queued, being run, or on its way to a sink."""
        return self.waiting[lane] == 0 and self.unacked == 0 and self.results == 0


def read_backlog(redis: Redis) -> Backlog:
    """A look at all queues."""
    prefix = sink_queue("")
    found = (key.decode() if isinstance(key, bytes) else key for key in redis.scan_iter(f"{prefix}*", 1000))
    node_queues = sorted(name for name in found if name.startswith(prefix))
    queues = [*all_queues(), *node_queues]
    pipe = redis.pipeline(transaction=False)
    for queue in queues:
        pipe.llen(queue)
    pipe.hlen(UNACKED)
    *lengths, unacked = pipe.execute()
    length = dict(zip(queues, lengths, strict=True))
    return Backlog(
        waiting={queue: length[queue] for queue in all_queues()},
        nodes={name.removeprefix(prefix): length[name] for name in node_queues},
        unacked=unacked,
    )
