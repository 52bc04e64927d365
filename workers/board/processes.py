"""What each worker process says of itself, in Redis: who is alive, with which servers, doing what.

A snapshot is overwritten as a whole every second and never added to, so a lost or repeated one does
no harm, and a process that says nothing any more is forgotten. What the feeder makes of them all is
`board.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from redis import Redis

from storage.json_records import parse_json, read_record
from workers.broker.keys import PROCESS_PREFIX, process_key
from workers.broker.queues import SINK

PROCESS_TTL_S = 15
"""A process that has said nothing for so long is taken for gone."""


class ServerState(StrEnum):
    """What a lane process knows of a server."""

    UP = "up"
    AWAY = "away"
    """Does not answer its probe; its calls went back to the queue."""
    SUSPECT = "suspect"
    """Has produced no token for a while: it takes no new calls, and those in flight go on."""
    UNSUITABLE = "unsuitable"
    """Answers, but its facts do not fit the run: it takes no calls."""
    UNKNOWN = "unknown"
    """Not probed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """What a server says of its load, over its data-parallel ranks."""

    running: int
    """Requests in its batch, whosever they are."""
    queued: int
    """Requests that wait in it."""
    kv_used: float
    """Share of its KV cache in use, 0 to 1: that of its fullest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSnapshot:
    """One server as one lane process sees it."""

    url: str
    state: ServerState
    since: float
    """When it came into this state, Unix seconds."""
    reason: str = ""
    """Why it is away or unsuitable, one sentence; empty when up."""
    slots: int = 0
    """Calls this process may have in flight there."""
    in_flight: int = 0
    """Calls this process has in flight there."""
    facts_id: str = ""
    """Which of `eyas:facts` it is; empty before it was connected to."""
    load: ServerLoad | None = None
    """What it last said of its own load; None when it does not say."""
    retractions: int = 0
    """How often it took back a request of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """What one worker process says of itself."""

    name: str
    """Celery's node name: `short@host`."""
    lane: str
    """`short`, `long`, `capture`, or `sink`."""
    node: str
    """`EYAS_NODE`."""
    pid: int
    at: float
    """When it was said, Unix seconds."""
    started: float
    """When the process began, Unix seconds: counters are since then."""
    state: str = "running"
    """`running`, `waiting` (something it needs is not there), `paused` (disk or spool full),
    or `stopping`."""
    says: str = ""
    """Why it is not running, or what is wrong, one sentence; empty when all is well."""
    in_flight: int = 0
    """A lane's calls in flight; a sink's messages held but not committed."""
    servers: tuple[ServerSnapshot, ...] = ()
    """A lane's servers."""
    done: int = 0
    """Results published by a lane; messages committed by a sink."""
    failed: int = 0
    """Dead letters published by a lane or made by a sink."""
    again: int = 0
    """Attempts that failed and were made again."""
    requeued: int = 0
    """Messages put back because their server went away or the process stopped."""
    wasted: int = 0
    """Calls whose result was stored already, found by a sink."""
    wasted_tokens: int = 0
    """What these had generated or captured."""
    tokens: int = 0
    """Response tokens generated (`short`, `long`), tokens captured (`capture`) or stored (`sink`)."""
    prompt_tokens: int = 0
    """Prompt tokens of the responses generated."""
    lost: int = 0
    """States a sink found lost or damaged in the spool: they are captured again."""
    aside: int = 0
    """Messages set aside: garbage, another version, another run."""
    written_bytes: int = 0
    """Bytes of states a sink committed, before compression."""
    spool_bytes: int | None = None
    """Bytes in the node's spool; None where the process has none."""
    spool_max_bytes: int | None = None
    spool_oldest: float | None = None
    """When the oldest file in the node's spool was written, Unix seconds; None for an empty one."""
    disk_free_bytes: int | None = None
    """Room left in the output's file system; None where the process does not write there."""

    def to_json(self) -> dict[str, Any]:
        """As Redis holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ProcessSnapshot":
        """The inverse of `to_json`; keys of newer versions are ignored. Raises `ValueError`."""
        return read_record(cls, content, extra="ignored")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Who would do work that is queued now."""

    lanes: frozenset[str]
    """Lanes with a live process."""
    sink_nodes: frozenset[str]
    """Nodes with a live sink process."""


def write_process(redis: Redis, snapshot: ProcessSnapshot) -> None:
    """Say it; it is forgotten after `PROCESS_TTL_S` unless said again."""
    redis.set(process_key(snapshot.name), json.dumps(snapshot.to_json()), ex=PROCESS_TTL_S)


def forget_process(redis: Redis, name: str) -> None:
    """Take back what an ending process said of itself."""
    redis.delete(process_key(name))


def read_processes(redis: Redis) -> tuple[ProcessSnapshot, ...]:
    """What the live processes say, by name; what cannot be read is left out."""
    keys = sorted(redis.scan_iter(match=f"{PROCESS_PREFIX}*", count=1000))
    found = []
    for data in redis.mget(keys) if keys else []:
        try:
            found.append(ProcessSnapshot.from_json(parse_json(data or b"")))
        except ValueError:
            continue
    return tuple(found)


def anyone_listening(redis: Redis) -> Listening:
    """Which lanes and sinks have a live process."""
    processes = read_processes(redis)
    return Listening(
        lanes=frozenset(p.lane for p in processes if p.lane != SINK),
        sink_nodes=frozenset(p.node for p in processes if p.lane == SINK),
    )
