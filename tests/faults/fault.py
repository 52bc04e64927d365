"""What a fault is, and the stage on which it happens."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.cluster import Cluster
from tests.faults.job import Job


@dataclass(slots=True, kw_only=True)
class Stage:
    """A cluster with a job on it, and the dice that the faults throw."""

    cluster: Cluster
    job: Job
    dice: random.Random
    over: threading.Event
    """Set when whatever waits is to end early."""

    def last(self, seconds: float) -> None:
        """Let the fault go on for so long."""
        self.over.wait(seconds)


def at_once(stage: Stage) -> bool:
    """Nothing to wait for but the next committed sample."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong."""

    kind: str
    """What is counted: `SIGKILL short`."""
    victim: str
    run: Callable[[Stage], None]
    """Makes it happen; returns when it is over and the system is left alone again."""
    is_back: Callable[[Stage], bool] = at_once
    """Whether the victim works again."""
    weight: float = 1.0
    """How often it is drawn, compared with others."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.victim})" if self.victim else self.kind
