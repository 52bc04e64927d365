"""What `status` and `watch` show: the run at a glance, written to Redis by the feeder once a second.

Overwritten as a whole, so a lost or repeated one does no harm. How the numbers come about is in
`scoreboard.py` and `rates.py`; how they are drawn, in the commands.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from redis import Redis

from storage.checks import ChecksSummary
from storage.json_records import parse_json, read_record
from workers.board.processes import ServerState
from workers.broker.keys import BOARD


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
    left_s: float | None = None
    """Time left at this dataset's own speed, by tokens, seconds; None before it can be known."""
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    """Code → dead letters, most first."""

    @property
    def share(self) -> float:
        """How far it is, 0 to 1: by samples or by its cap on tokens, whichever is nearer."""
        if self.finished:
            return 1.0
        by_samples = (self.stored + self.failed) / self.wanted if self.wanted else 0.0
        by_tokens = self.tokens / self.max_tokens if self.max_tokens else 0.0
        return min(1.0, max(by_samples, by_tokens))


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
    """Calls whose result was stored already."""
    republished: int
    """Messages published again because they were lost."""
    spool_bytes: int
    """Over all nodes."""
    disk_free_bytes: int | None
    """The least room any sink sees in the output's file system."""
    stored_bytes: int | None = None
    """Bytes of the store on its disk; None before they were counted."""
    checks: ChecksSummary | None = None
    """What checking a few samples came to; None while none was checked."""
    wasted_tokens: int = 0
    """What these had generated or captured."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What a person should know now, a sentence each: a paused sink, a server away."""

    def to_json(self) -> dict[str, Any]:
        """As Redis and `status --json` hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Board":
        """The inverse of `to_json`; keys of newer versions are ignored. Raises `ValueError`."""
        return read_record(cls, content, extra="ignored")

    @property
    def wanted(self) -> int:
        """Prompts wanted, over all datasets."""
        return sum(d.wanted for d in self.datasets)

    @property
    def done(self) -> int:
        """Prompts with their outcome, dead letters included, over all datasets."""
        return sum(d.stored + d.failed for d in self.datasets)


def write_board(redis: Redis, board: Board) -> None:
    """Replace the board."""
    redis.set(BOARD, json.dumps(board.to_json()))


def read_board(redis: Redis) -> Board | None:
    """The board last written, or None when there is none that can be read."""
    data = redis.get(BOARD)
    try:
        return None if data is None else Board.from_json(parse_json(data))
    except ValueError:
        return None
