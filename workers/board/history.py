"""A run over time: a sample each 5 s in Redis, thinned out as it grows old, for the page that shows it.

Three streams, one for each step, each bounded; a coarser one takes a sample each time its step has
passed. Times are those of Redis, so that writers on several machines agree. Losing Redis loses
the history and nothing else. Counters in a sample are sums since the run began; whoever reads
makes speeds of them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from redis import Redis

from storage.json_records import parse_json, read_record
from workers.broker.keys import history_key

STEPS_S: Mapping[int, int] = {5: 1440, 60: 2880, 600: 4320}
"""Seconds between samples → samples kept: two hours, two days, thirty days."""
FINEST_S = min(STEPS_S)


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

    Newer ones are taken from the finest. Raises `RedisError`.
    """
    reaching = [step for step, kept in STEPS_S.items() if now - since <= step * kept]
    step = min(reaching, default=max(STEPS_S))
    samples = _read(redis.xrange(history_key(step), min=str(max(0, int(since * 1000)))))
    if step != FINEST_S:
        samples += _read(redis.xrevrange(history_key(FINEST_S), count=1))
    mine = {one.at: one for one in samples if one.run == run}
    return tuple(mine[at] for at in sorted(mine))


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
    found = []
    for _, fields in entries:
        try:
            found.append(read_record(Sample, parse_json(fields[b"s"]), extra="ignored"))
        except (KeyError, ValueError):
            continue
    return found
