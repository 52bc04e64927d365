"""What all processes of a run have done, added up: counters that never go back while the run lasts.

A process counts from 0 when it starts; the tally adds what it counted since the last look, so
processes may come and go. It is kept in Redis, so that the next feeder goes on with it. A process
killed between two looks takes the last second's counts with it, and a Redis that loses its data
takes all: the truth of what is stored is the store's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from redis import Redis

from storage.json_records import parse_json, read_record
from workers.board.processes import ProcessSnapshot
from workers.broker.keys import TALLY

FORGET_S = 3600.0
"""A process that has said nothing for so long will not be back; until then it is known again."""

LANE_COUNTERS = (
    *("done", "failed", "again", "requeued", "wasted", "wasted_tokens", "tokens", "prompt_tokens"),
    *("lost", "aside", "written_bytes"),
)
"""The counters of a `ProcessSnapshot`, added up per lane (`sink` is one of them)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One process as it was last seen."""

    at: float
    """Unix seconds."""
    counts: Mapping[str, int] = field(default_factory=dict)
    retractions: Mapping[str, int] = field(default_factory=dict)
    """Server → how often it took back a request of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The counters of one run."""

    run: str
    lanes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Lane → counter → sum."""
    retractions: Mapping[str, int] = field(default_factory=dict)
    """Server → how often it took a request back."""
    seen: Mapping[str, Counted] = field(default_factory=dict)
    """Process and its start → what was added of it already."""

    def of(self, counter: str, *lanes: str) -> int:
        """One counter over these lanes, or over all."""
        return sum(self.lanes[lane].get(counter, 0) for lane in lanes or self.lanes if lane in self.lanes)

    @property
    def output_tokens(self) -> int:
        """Response tokens generated."""
        return self.of("tokens", "short", "long")

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of these responses."""
        return self.of("prompt_tokens", "short", "long")

    @property
    def captured_tokens(self) -> int:
        """Tokens whose states were taken by a call of their own."""
        return self.of("tokens", "capture")


def add_up(before: Tally, processes: Sequence[ProcessSnapshot], now: float) -> Tally:
    """The tally with what these processes have counted since."""
    lanes = {lane: dict(counts) for lane, counts in before.lanes.items()}
    retractions = dict(before.retractions)
    seen = {key: one for key, one in before.seen.items() if now - one.at < FORGET_S}
    for process in processes:
        key = f"{process.name} {process.started!r}"
        last = seen.get(key, Counted(at=now))
        counts = {name: getattr(process, name) for name in LANE_COUNTERS}
        theirs = {server.url: server.retractions for server in process.servers}
        _add(lanes.setdefault(process.lane, {}), counts, last.counts)
        _add(retractions, theirs, last.retractions)
        # A server that a process no longer names may come back to it with its old count.
        seen[key] = Counted(at=now, counts=counts, retractions={**last.retractions, **theirs})
    return Tally(run=before.run, lanes=lanes, retractions=retractions, seen=seen)


def _add(sums: dict[str, int], counts: Mapping[str, int], last: Mapping[str, int]) -> None:
    for name, count in counts.items():
        sums[name] = sums.get(name, 0) + max(0, count - last.get(name, 0))


def write_tally(redis: Redis, tally: Tally) -> None:
    """Replace it."""
    redis.set(TALLY, json.dumps(asdict(tally)))


def read_tally(redis: Redis, run: str) -> Tally:
    """The run's tally; an empty one when there is none, or it is another run's."""
    data = redis.get(TALLY)
    try:
        tally = Tally(run=run) if data is None else read_record(Tally, parse_json(data), extra="ignored")
    except ValueError:
        return Tally(run=run)
    return tally if tally.run == run else Tally(run=run)
