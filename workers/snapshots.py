"""What a worker process says of itself every second, for `status` and `watch`.

Written under `eyas:process:<name>` with a time to live, so a process that is gone is gone from the
board by itself. Nothing decides by these numbers; they are for people.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from redis import Redis

from workers.keys import PROCESS_PREFIX, process_key

TTL_S = 15
"""How long a snapshot outlives its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSnapshot:
    """One server as this process sees it."""

    url: str
    state: str
    """`up`, `away` (does not answer), `unsuitable` (answers, must not be used) or `unknown`."""
    since: float
    """When it came into that state, Unix seconds."""
    reason: str = ""
    """Why it takes no calls; empty when it does."""
    slots: int = 0
    """Calls this process may have in flight there."""
    in_flight: int = 0
    """Calls this process has in flight there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counted since the process started; a restart begins at 0."""

    done: int = 0
    """Results published, dead letters not included."""
    prompt_tokens: int = 0
    """Of the requests that ended in a result."""
    output_tokens: int = 0
    """Generated tokens of those results; 0 for a capture."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Dead letters by code."""
    wasted: int = 0
    """Deliveries that were acknowledged because another delivery did their work."""
    requeued: int = 0
    """Deliveries given back: server away, slots lowered, process stopping."""
    dropped: int = 0
    """Acknowledged unrun: dataset closed, or another run's."""
    garbage: int = 0
    """Set aside: no message, or of another version."""
    lost: int = 0
    """States a sink found lost or damaged in the spool: they are captured again."""
    state_bytes: int = 0
    """Bytes of states a sink committed, as they lay in the spool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """One worker process."""

    name: str
    """Celery's node name, `short@host`."""
    lane: str
    """`short`, `long`, `capture` or `sink`."""
    node: str
    """`EYAS_NODE`."""
    pid: int
    at: float
    """When this was written, Unix seconds."""
    started: float
    """When the process started, Unix seconds."""
    capacity: int = 0
    """`-c`: calls this process can have in flight at most."""
    in_flight: int = 0
    """Calls in flight over all servers; for a sink, messages held."""
    draining: bool = False
    """Whether it has been told to stop."""
    servers: tuple[ServerSnapshot, ...] = ()
    counters: Counters = Counters()
    note: str = ""
    """Why it does nothing just now, when it does not; empty otherwise."""
    spool_bytes: int | None = None
    """Bytes in its node's spool; None where the process does not look."""
    spool_max_bytes: int | None = None
    """The spool's bound."""
    disk_free_bytes: int | None = None
    """Room left in the output's file system; None where the process does not write there."""


def write_snapshot(redis: Redis, snapshot: ProcessSnapshot) -> None:
    """Replace this process's snapshot."""
    redis.set(process_key(snapshot.name), json.dumps(asdict(snapshot)), ex=TTL_S)


def read_snapshots(redis: Redis) -> tuple[ProcessSnapshot, ...]:
    """Every live process's snapshot, by name; what cannot be read is left out."""
    keys = sorted(redis.scan_iter(match=PROCESS_PREFIX + "*", count=1000))
    found = []
    for text in redis.mget(keys) if keys else ():
        try:
            found.append(_from_json(json.loads(text)))
        except (TypeError, ValueError, KeyError):
            continue
    return tuple(found)


def _from_json(content: dict[str, Any]) -> ProcessSnapshot:
    return ProcessSnapshot(
        **content
        | {
            "servers": tuple(ServerSnapshot(**server) for server in content["servers"]),
            "counters": Counters(**content["counters"]),
        }
    )
