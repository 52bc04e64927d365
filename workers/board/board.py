"""What `status` and `watch` show, and what each process says of itself: snapshots in Redis.

A snapshot is overwritten as a whole and never added to, so a lost or repeated one does no harm.
`ProcessSnapshot` is written by each lane and sink process every second, `Board` by the feeder.
How the numbers come about is in `scoreboard.py` and `rates.py`; how they are drawn, in the commands.
"""

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from redis import Redis

from workers.broker.keys import BOARD

PROCESS = "eyas:process:"
PROCESS_TTL_S = 15
"""A process that has said nothing for so long is taken for gone."""


class ServerState(StrEnum):
    """What a lane process knows of a server."""

    UP = "up"
    AWAY = "away"
    """Does not answer its probe; its calls went back to the queue."""
    UNSUITABLE = "unsuitable"
    """Answers, but its facts do not fit the run: it takes no calls."""
    UNKNOWN = "unknown"
    """Not probed yet."""


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
    """Results that were stored already: calls made twice."""
    tokens: int = 0
    """Response tokens generated (`short`, `long`), tokens captured (`capture`) or stored (`sink`)."""
    lost: int = 0
    """States a sink found lost or damaged in the spool: they are captured again."""
    aside: int = 0
    """Messages set aside: garbage, another version, another run."""
    written_bytes: int = 0
    """Bytes of states a sink committed, before compression."""
    spool_bytes: int | None = None
    """Bytes in the node's spool; None where the process has none."""
    spool_max_bytes: int | None = None
    disk_free_bytes: int | None = None
    """Room left in the output's file system; None where the process does not write there."""

    def to_json(self) -> dict[str, Any]:
        """As Redis holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ProcessSnapshot":
        """The inverse of `to_json`; keys of newer versions are ignored."""
        return typing.cast(ProcessSnapshot, _read(cls, content))


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetBoard:
    """One dataset's progress."""

    name: str
    wanted: int
    """Prompts wanted of those known so far: below the caps, dead letters included."""
    reading: bool
    """Whether `enqueue` may still add prompts, so that `wanted` grows."""
    generated: int
    """Wanted prompts with a response."""
    stored: int
    """Wanted prompts whose sample is complete: with states, unless the run keeps none."""
    failed: int
    """Dead letters."""
    truncated: int
    """Responses that ended at the token limit."""
    tokens: int
    """Prompt and response tokens stored."""
    prompt_tokens: int
    """Tokens of the wanted prompts."""
    queued: int
    """Published and not stored yet."""
    max_samples: int | None
    max_tokens: int | None
    closed: bool
    """Whether its caps are reached: it wants no more responses."""
    finished: bool
    """Whether every wanted prompt has its outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBoard:
    """One lane over all its processes and servers."""

    name: str
    limit_per_server: int
    """0 when the settings give none."""
    limit: int
    """Over all servers that are up."""
    in_flight: int
    waiting: int
    """Messages in the queue."""
    processes: int
    """Live processes that serve it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBoard:
    """One server over all processes that call it."""

    url: str
    lanes: tuple[str, ...]
    """Lanes whose processes know it."""
    state: ServerState
    """The worst that a live process says."""
    since: float | None
    """When it came into this state, Unix seconds; None when nobody knows."""
    reason: str
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkBoard:
    """One sink process."""

    name: str
    node: str
    state: str
    says: str
    waiting: int
    """Messages it holds and those in its node's queue."""
    spool_bytes: int | None
    spool_max_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed over the last while, from what the store holds."""

    over_s: float
    """Length of the window, seconds."""
    generated_tokens_per_s: float
    """Response tokens."""
    stored_tokens_per_s: float
    """Tokens of finished samples, prompt and response."""
    samples_per_s: float
    """Finished samples, dead letters included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The run at a glance."""

    run_id: str
    model: str
    output_dir: str
    at: float
    """When it was written, Unix seconds: an old one means that no feeder is up."""
    started: float
    """When the feeder took up this run, Unix seconds."""
    holder: str
    """Who holds the role of the feeder."""
    states: str
    """The run's states mode: `replay`, `inline` or `off`."""
    finished: bool
    datasets: tuple[DatasetBoard, ...]
    lanes: tuple[LaneBoard, ...]
    servers: tuple[ServerBoard, ...]
    sinks: tuple[SinkBoard, ...]
    rates: Rates | None
    """None before they can be known."""
    left_s: float | None
    """Time left at this speed, by tokens, seconds; None before it can be known."""
    window: int
    """Messages published and not stored yet."""
    unacked: int
    """Messages that some process holds."""
    sink_waiting: int
    """Results not yet committed: in the sinks' queues or held by a sink."""
    wasted: int
    """Results that were stored already: calls made twice."""
    republished: int
    """Messages published again because they were lost."""
    spool_bytes: int
    """Over all nodes."""
    disk_free_bytes: int | None
    """The least room any sink sees in the output's file system."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What a person should know now, a sentence each: a paused sink, a server away."""

    def to_json(self) -> dict[str, Any]:
        """As Redis and `status --json` hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Board":
        """The inverse of `to_json`; keys of newer versions are ignored."""
        return typing.cast(Board, _read(cls, content))

    @property
    def wanted(self) -> int:
        """Prompts wanted, over all datasets."""
        return sum(d.wanted for d in self.datasets)

    @property
    def done(self) -> int:
        """Prompts with their outcome, dead letters included, over all datasets."""
        return sum(d.stored + d.failed for d in self.datasets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Who would do work that is queued now."""

    lanes: frozenset[str]
    """Lanes with a live process."""
    sink_nodes: frozenset[str]
    """Nodes with a live sink process."""


def write_process(redis: Redis, snapshot: ProcessSnapshot) -> None:
    """Say it; it is forgotten after `PROCESS_TTL_S` unless said again."""
    redis.set(PROCESS + snapshot.name, json.dumps(snapshot.to_json()), ex=PROCESS_TTL_S)


def forget_process(redis: Redis, name: str) -> None:
    """Take back what an ending process said of itself."""
    redis.delete(PROCESS + name)


def read_processes(redis: Redis) -> tuple[ProcessSnapshot, ...]:
    """What the live processes say, by name; what cannot be read is left out."""
    keys = sorted(redis.scan_iter(match=f"{PROCESS}*", count=1000))
    found = []
    for data in redis.mget(keys) if keys else []:
        try:
            found.append(ProcessSnapshot.from_json(json.loads(data or b"")))
        except (KeyError, TypeError, ValueError):
            continue
    return tuple(found)


def write_board(redis: Redis, board: Board) -> None:
    """Replace the board."""
    redis.set(BOARD, json.dumps(board.to_json()))


def read_board(redis: Redis) -> Board | None:
    """The board last written, or None when there is none that can be read."""
    data = redis.get(BOARD)
    try:
        return None if data is None else Board.from_json(json.loads(data))
    except (KeyError, TypeError, ValueError):
        return None


def anyone_listening(redis: Redis) -> Listening:
    """Which lanes and sinks have a live process."""
    processes = read_processes(redis)
    return Listening(
        lanes=frozenset(p.lane for p in processes if p.lane != "sink"),
        sink_nodes=frozenset(p.node for p in processes if p.lane == "sink"),
    )


def _read(kind: Any, content: Any) -> Any:
    """`content` as the annotated type `kind`: dataclasses, tuples of one type, enums, plain values."""
    if is_dataclass(kind):
        types_of = typing.get_type_hints(kind)
        known = {f.name: content[f.name] for f in fields(kind) if f.name in content}
        return typing.cast(Any, kind)(**{name: _read(types_of[name], v) for name, v in known.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_read(arguments[0], each) for each in content)
    if origin in (types.UnionType, typing.Union):
        return None if content is None else _read(arguments[0], content)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(content)
    return content
