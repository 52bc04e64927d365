"""How long the system takes to go on: when samples were committed, as the folder itself shows."""

import threading
import time
from pathlib import Path

from tests.faults.cluster import Cluster

LOOK_S = 0.1
LANES = frozenset({"short", "long", "capture"})
MERGED = "s-merged-"
"""Begins the name of a segment that holds nothing new."""


class Lanes:
    """Which lanes have published a result since this was made, as their processes say."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before = self._done()

    def rest(self) -> frozenset[str]:
        """Those that have not."""
        now = self._done()
        return LANES - {key[0] for key, done in now.items() if done > self._before.get(key, 0)}

    def _done(self) -> dict[tuple[str, str, int], int]:
        seen = self._cluster.glance()
        return {(p.lane, p.name, p.pid): p.done for p in (seen.processes if seen else ())}


class Commits:
    """Watches a folder of states for new segments, in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()
        self._new = threading.Condition()
        self._last = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)
        self._thread.start()

    def wait_after(self, moment: float, at_most_s: float) -> float | None:
        """Seconds from the moment (monotonic) to the first commit after it; None when none came in time."""
        deadline = moment + at_most_s
        with self._new:
            while self._last <= moment:
                if (left := deadline - time.monotonic()) <= 0:
                    return None
                self._new.wait(left)
            return self._last - moment

    def __len__(self) -> int:
        return len(self._seen)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                found = {path.name for path in self._folder.glob("s-*") if not path.name.startswith(MERGED)}
            except OSError:
                continue  # not there yet, or away
            if found - self._seen:
                with self._new:
                    self._seen |= found
                    self._last = time.monotonic()
                    self._new.notify_all()
