"""Processes killed, stopped and continued: SIGKILL and SIGSTOP of every one."""

import signal
from collections.abc import Callable, Iterator

from tests.faults.cluster import Cluster
from tests.faults.fault import Fault, Stage

BUSY_WITHIN_S = 20.0
STOPS_S = (3.0, 15.0, 35.0, 50.0)
"""How long a process stands still: shorter and longer than its lease of 40 s."""


def all_faults(cluster: Cluster, spared: frozenset[str] = frozenset()) -> Iterator[Fault]:
    """`spared` are never killed, so that their memory can be watched."""
    victims = [*cluster.workers(), *cluster.engines, "redis"]
    for name in victims:
        if name not in spared:
            yield killed(name)
        yield stopped(name)
    yield Fault(kind="SIGKILL enqueue", victim="", run=kill_enqueue, weight=2)
    yield Fault(kind="SIGSTOP enqueue", victim="", run=stop_enqueue)


def killed(name: str, weight: float = 2.0) -> Fault:
    """SIGKILL while it has work in its hands."""

    def run(stage: Stage) -> None:
        wait_until_busy(stage, name)
        stage.cluster[name].kill()

    return Fault(kind=f"SIGKILL {sort_of(name)}", victim=name, run=run, is_back=works(name), weight=weight)


def stopped(name: str, seconds: float | None = None) -> Fault:
    """SIGSTOP, a while, SIGCONT: it has not noticed anything and believes what it knew."""

    def run(stage: Stage) -> None:
        wait_until_busy(stage, name)
        process = stage.cluster[name]
        process.send(signal.SIGSTOP)
        try:
            stage.last(stage.dice.choice(STOPS_S) if seconds is None else seconds)
        finally:
            process.send(signal.SIGCONT)

    return Fault(kind=f"SIGSTOP {sort_of(name)}", victim=name, run=run, is_back=works(name), weight=0.7)


def kill_enqueue(stage: Stage) -> None:
    """SIGKILL at any moment between its first import and its end."""
    stage.job.enqueue()
    stage.last(stage.dice.uniform(0.2, 3.0))
    stage.job.kill_enqueue()


def stop_enqueue(stage: Stage) -> None:
    stage.job.enqueue()
    stage.last(stage.dice.uniform(0.2, 2.0))
    process = stage.job.enqueueing
    assert process is not None
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        stage.last(stage.dice.choice(STOPS_S[:3]))
        process.send_signal(signal.SIGCONT)


def wait_until_busy(stage: Stage, name: str) -> None:
    """Until it has work in its hands, if that comes soon; of what all calls go through, any."""
    if "@" in name:
        for _ in range(int(BUSY_WITHIN_S / 0.05)):
            if stage.cluster.in_flight(name) or stage.over.wait(0.05):
                return
    else:
        stage.last(stage.dice.uniform(0, 2))


def works(name: str) -> Callable[[Stage], bool]:
    """Whether the process as it runs now has done something or is at it."""

    def is_back(stage: Stage) -> bool:
        seen = stage.cluster.glance()
        if seen is None:
            return False
        if "@" not in name:
            return True
        pid = stage.cluster[name].pid
        return any(p.pid == pid and (p.done or p.in_flight) for p in seen.processes)

    return is_back


def sort_of(name: str) -> str:
    """`short@node1` → `short`, `engine2` → `engine`."""
    return name.partition("@")[0].partition(".")[0].rstrip("0123456789")
