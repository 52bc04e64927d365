"""One small job that suffers one fault, finishes by itself, and is checked by every invariant."""

import random
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.faults.cluster import HURRIED, Cluster, Shape, cluster_in, until
from tests.faults.fault import Stage
from tests.faults.invariants import Checked, Invariants
from tests.faults.job import Job

PROMPTS = 24
ENOUGH = 4000
"""Prompts in each file: all tests on one cluster take theirs from it."""


class Trial:
    """A cluster with a job on it, and what has been checked of it."""

    def __init__(self, cluster: Cluster, lanes: tuple[str, ...], states: str, seed: int) -> None:
        self.cluster = cluster
        self.job = Job(cluster, prompts=ENOUGH, lanes=lanes, states=states)
        self.stage = Stage(cluster=cluster, job=self.job, dice=random.Random(seed), over=threading.Event())
        self.invariants = Invariants(cluster, self.job)
        self.is_broken = False

    def survives(
        self, fault: Callable[[Stage], object], prompts: int = PROMPTS, *, within_s: float = 120.0
    ) -> Checked:
        """Ask for more prompts, let it happen while they are in work, and wait for their end."""
        self.is_broken = True
        self.begin(prompts)
        fault(self.stage)
        checked = self.ends_well(within_s=within_s)
        self.is_broken = False
        return checked

    def begin(self, prompts: int = PROMPTS) -> None:
        """Ask for more, and wait until some are in work."""
        self.job.begin_more(prompts)
        until(self._works, "calls are in flight", 180.0)

    def ends_well(self, dead: Sequence[bytes] = (), *, within_s: float = 120.0) -> Checked:
        """Wait for the end of what was asked for, and check everything."""
        while not self.job.keep_asking():
            time.sleep(0.1)
        self.job.finish(within_s)
        return self.invariants.hold(dead)

    def _works(self) -> bool:
        self.job.keep_asking()
        seen = self.cluster.glance()
        return seen is not None and any(p.in_flight for p in seen.processes)


class Trials:
    """The cluster that a file's tests share; a new one after a test that failed."""

    def __init__(
        self,
        folder: Path,
        shape: Shape | None = None,
        *,
        lanes: tuple[str, ...] = ("short",),
        states: str = "replay",
    ) -> None:
        self._folder, self._lanes, self._states = folder, lanes, states
        self._shape = shape or Shape(timing=HURRIED)
        self._stack = ExitStack()
        self._trial: Trial | None = None
        self._made = 0

    def next(self, name: str) -> Trial:
        """For the test of this name: the dice of its faults come from it."""
        seed = zlib.crc32(name.encode())
        if self._trial is None or self._trial.is_broken:
            self.close()
            self._made += 1
            cluster = self._stack.enter_context(cluster_in(self._folder / str(self._made), self._shape, seed))
            cluster.wait_until_ready()
            self._trial = Trial(cluster, self._lanes, self._states, seed)
        self._trial.stage.dice.seed(seed)
        return self._trial

    def close(self) -> None:
        if self._trial is not None:
            self._trial.job.end()
        self._stack.close()
        self._stack = ExitStack()
