"""What the charts show, from a run's samples: speeds from sums, at evenly spaced moments. Pure.

A moment without a sample near it is None, which a chart draws as a gap: nobody fed then.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from workers.board.history import FINEST_S, Sample

MOMENTS = 180
"""Most moments a chart shows."""
SMOOTH_S = 30.0
"""A speed is a mean over so long at least: calls end in bursts."""
MISSING_S = 4.0 * FINEST_S
"""A moment whose last sample is older than this, and than two steps, has none."""


def series(samples: Sequence[Sample], since: float, now: float) -> dict[str, Any]:
    """Columns of equal length over `times`, Unix seconds; all empty without samples.

    Speeds are per second, shares 0 to 1, the rest as in `Sample`; `over` is whether the run is.
    """
    span = max(now - since, float(FINEST_S))
    step = max(span / MOMENTS, float(FINEST_S))
    count = int(span / step) if samples else 0
    times = [now - (count - 1 - at) * step for at in range(count)]
    at = _Samples(samples, missing_s=max(MISSING_S, 2.0 * step), over_s=max(SMOOTH_S, 2.0 * step))
    lanes = sorted({name for one in samples for name in one.lanes}, key=_lane_order)
    servers = sorted({url for one in samples for url in one.servers})
    return {
        "answers": True,
        "over": bool(samples) and samples[-1].finished,
        "from": since,
        "to": now,
        "step_s": step,
        "over_s": at.over_s,
        "times": [round(time, 3) for time in times],
        "output": at.speeds(times, lambda one: one.output_tokens),
        "prompt": at.speeds(times, lambda one: one.prompt_tokens),
        "captured": at.speeds(times, lambda one: one.captured_tokens),
        "samples": at.speeds(times, lambda one: one.samples),
        "spool": at.values(times, lambda one: one.spool_bytes),
        "stored": at.values(times, lambda one: one.stored_bytes),
        "lanes": {
            name: {
                field: at.values(times, _of_lane(name, field)) for field in ("in_flight", "limit", "waiting")
            }
            for name in lanes
        },
        "servers": {
            url: {field: at.values(times, _of_server(url, field)) for field in ("in_flight", "kv_used")}
            for url in servers
        },
    }


class _Samples:
    """Samples by time."""

    def __init__(self, samples: Sequence[Sample], *, missing_s: float, over_s: float) -> None:
        self.over_s = over_s
        self._samples, self._missing_s = samples, missing_s
        self._times = [one.at for one in samples]

    def _last(self, time: float) -> Sample | None:
        """The last sample at a moment, unless it is too old to speak for it."""
        place = bisect_right(self._times, time + 0.001)
        if not place or time - self._times[place - 1] > self._missing_s:
            return None
        return self._samples[place - 1]

    def values(self, times: Sequence[float], of: Callable[[Sample], float | None]) -> list[float | None]:
        return [None if (one := self._last(time)) is None else of(one) for time in times]

    def speeds(self, times: Sequence[float], of: Callable[[Sample], int]) -> list[float | None]:
        return [self._speed(time, of) for time in times]

    def _speed(self, time: float, of: Callable[[Sample], int]) -> float | None:
        last = self._last(time)
        if last is None:
            return None
        first = self._samples[min(bisect_right(self._times, last.at - self.over_s), len(self._samples) - 1)]
        seconds = last.at - first.at
        if seconds < 0.8 * FINEST_S:
            return None
        # A Redis that lost its data began to count anew.
        return round(max(0.0, (of(last) - of(first)) / seconds), 3)


def _of_lane(name: str, field: str) -> Callable[[Sample], float | None]:
    return lambda one: getattr(one.lanes[name], field) if name in one.lanes else None


def _of_server(url: str, field: str) -> Callable[[Sample], float | None]:
    return lambda one: getattr(one.servers[url], field) if url in one.servers else None


def _lane_order(name: str) -> tuple[int, str]:
    known = ("short", "long", "capture")
    return (known.index(name) if name in known else len(known), name)
