"""Memory and open files of every process, and Redis' memory, over time, as CSV; and whether they are flat."""

import csv
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import redis

from tests.faults.cluster import Cluster

EVERY_S = 10.0
WARM_S = 300.0
"""A process fills its caches for so long; what comes after must be flat."""
POINTS = 200
"""Looked at for a slope, at most: pairs of them are compared."""
LEAST_S = 540.0
"""Less than this says nothing about an hour."""
BOUNDS = {"rss_mb": 60.0, "files": 30.0, "redis_mb": 30.0}
"""Largest growth an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at one process."""

    at_s: float
    """Since the beginning."""
    process: str
    pid: int
    what: str
    """`rss_mb`, `files`, `redis_mb`."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """How one figure of one process grows."""

    process: str
    what: str
    an_hour: float
    over_s: float
    """Of its longest life, without its warming up."""

    @property
    def is_flat(self) -> bool:
        return self.an_hour <= BOUNDS[self.what]


class Gauges:
    """Reads them every few seconds, in a thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._began = time.monotonic()
        self.readings: list[Reading] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gauges", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def write(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["at_s", "process", "pid", "what", "value"])
            for r in self.readings:
                rows.writerow([f"{r.at_s:.0f}", r.process, r.pid, r.what, f"{r.value:.1f}"])

    def slopes(self) -> list[Slope]:
        """Of the longest life of each process, after it is warm: the median over all pairs of readings.

        Theil and Sen's: a step, as when a sink merges segments for the first time, is no growth.
        """
        lives: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
        for r in self.readings:
            lives.setdefault((r.process, r.what, r.pid), []).append((r.at_s, r.value))
        longest: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for (process, what, _), points in lives.items():
            warm = [point for point in points if point[0] >= points[0][0] + WARM_S]
            if len(warm) > len(longest.get((process, what), ())):
                longest[process, what] = warm
        found = []
        for (process, what), points in sorted(longest.items()):
            over_s = points[-1][0] - points[0][0]
            if over_s >= LEAST_S:
                at, values = np.array(points[:: 1 + len(points) // POINTS]).T
                first, second = np.triu_indices(len(at), 1)
                slope = float(np.median((values[second] - values[first]) / (at[second] - at[first]) * 3600))
                found.append(Slope(process=process, what=what, an_hour=slope, over_s=over_s))
        return found

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            at_s = time.monotonic() - self._began
            for name, process in list(self._cluster.supervisor.processes.items()):
                if (pid := process.pid) is not None:
                    with suppress(psutil.Error, OSError):
                        self._read(at_s, name, pid)
            with suppress(redis.RedisError, OSError):
                used = self._cluster.client.info("memory")["used_memory"]
                self._note(at_s, "redis", 0, "redis_mb", used / 1e6)

    def _read(self, at_s: float, name: str, pid: int) -> None:
        seen = psutil.Process(pid)
        self._note(at_s, name, pid, "rss_mb", seen.memory_info().rss / 1e6)
        self._note(at_s, name, pid, "files", seen.num_fds())

    def _note(self, at_s: float, process: str, pid: int, what: str, value: float) -> None:
        self.readings.append(Reading(at_s=at_s, process=process, pid=pid, what=what, value=value))
