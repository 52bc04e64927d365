"""A run over time: a sample each 5 s in Redis, thinned out as it grows old, for the page that shows it.

Three streams, one for each step, each bounded; a coarser one takes a sample each time its step has
passed. Times are those of Redis, so that writers on several machines agree. Losing Redis loses
the history and nothing else. Counters in a sample are sums since the run began; whoever reads
makes speeds of them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from redis import Redis

from storage.json_records import parse_json, read_record
from workers.broker.keys import history_key

STEPS_S: Mapping[int, int] = {5: 1440, 60: 2880, 600: 4320}
"""Seconds between samples → samples kept: two hours, two days, thirty days."""
FINEST_S = min(STEPS_S)
MOST = 500
"""Samples read at once: more than a chart has moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSample:
    """One lane at a moment."""

    in_flight: int
    limit: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSample:
    """One server at a moment."""

    in_flight: int
    kv_used: float | None
    """Share of its KV cache in use, 0 to 1; None when it does not say."""
    retractions: int
    """Sum since the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A run at a moment."""

    run: str
    at: float
    """Unix seconds, by Redis' clock; 0 until it is written."""
    prompt_tokens: int
    """Of the responses generated, sum."""
    output_tokens: int
    """Generated, sum."""
    captured_tokens: int
    """Captured by calls of their own, sum."""
    finished: bool
    """Whether the run was: nothing more is written then."""
    samples: int
    """Wanted prompts with their outcome, dead letters included."""
    failed: int
    """Dead letters among them."""
    wasted: int
    """Calls made twice, sum."""
    stored_bytes: int | None
    spool_bytes: int
    disk_free_bytes: int | None
    lanes: Mapping[str, LaneSample] = field(default_factory=dict)
    servers: Mapping[str, ServerSample] = field(default_factory=dict)


class History:
    """One run's history, to be written to."""

    def __init__(self, redis: Redis, run: str) -> None:
        self._redis, self._run = redis, run
        self._last: dict[int, float] | None = None
        self._over = False

    def add(self, sample: Sample) -> None:
        """Write the sample wherever its step has passed. Raises `RedisError`."""
        seconds, micros = self._redis.time()
        now = seconds + micros / 1e6
        if self._last is None:
            self._last = self._begin()
        if self._over and sample.finished:
            return
        self._over = sample.finished
        data = json.dumps(asdict(sample) | {"at": round(now, 3)}, separators=(",", ":"))
        for step, kept in STEPS_S.items():
            # The run's last one goes into all. A clock that was put back must not silence the
            # history until it has caught up.
            if self._over or not 0 <= now - self._last.get(step, float("-inf")) < 0.9 * step:
                self._redis.xadd(history_key(step), {"s": data}, maxlen=kept, approximate=False)
                self._last[step] = now

    def _begin(self) -> dict[int, float]:
        """When each step was last written; what is another run's is deleted."""
        last: dict[int, float] = {}
        for step in STEPS_S:
            newest = _read(self._redis.xrevrange(history_key(step), count=1))
            if newest and newest[0].run == self._run:
                last[step], self._over = newest[0].at, newest[0].finished
            else:
                self._redis.delete(history_key(step))
        return last


def read_history(redis: Redis, run: str, since: float, now: float) -> tuple[Sample, ...]:
    """The run's samples from `since` on, oldest first: of the finest step that still reaches so far.

    Some hundreds evenly spread at most, and the newest of all. Raises `RedisError`.
    """
    reaching = [step for step, kept in STEPS_S.items() if now - since <= step * kept]
    step = min(reaching, default=max(STEPS_S))
    entries: Any = redis.xrange(history_key(step), min=str(max(0, int(since * 1000))))
    samples = _read(_spread(entries, since, now))
    if step != FINEST_S:
        samples += _read(redis.xrevrange(history_key(FINEST_S), count=1))
    mine = {one.at: one for one in samples if one.run == run}
    return tuple(mine[at] for at in sorted(mine))


def _spread(entries: Sequence[Any], since: float, now: float) -> list[Any]:
    """The last entry in each of `MOST` equal spans of time, by the times in their ids."""
    width_ms = max(1.0, 1000 * (now - since) / MOST)
    last: dict[int, Any] = {}
    for entry in entries:
        last[int((int(entry[0].split(b"-")[0]) - 1000 * since) // width_ms)] = entry
    return list(last.values())


def ends_of_history(redis: Redis, run: str) -> tuple[Sample, Sample] | None:
    """The oldest and the newest sample there is of the run; None without any. Raises `RedisError`."""
    found: list[Sample] = []
    for step in STEPS_S:
        found += _read(redis.xrange(history_key(step), count=1))
        found += _read(redis.xrevrange(history_key(step), count=1))
    mine = sorted((one for one in found if one.run == run), key=lambda one: one.at)
    return (mine[0], mine[-1]) if mine else None


def _read(entries: Any) -> list[Sample]:
    """The samples in what a stream's reader gives; what cannot be read is left out."""
    samples = (_parsed(fields.get(b"s", b"")) for _, fields in entries)
    return [sample for sample in samples if sample is not None]


@lru_cache(maxsize=2048)
def _parsed(text: bytes) -> Sample | None:
    """Kept, since whoever watches reads mostly what was read a moment before."""
    try:
        return read_record(Sample, parse_json(text), extra="ignored")
    except ValueError:
        return None
