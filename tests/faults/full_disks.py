"""Disks: spool and store full to the last byte, the spool wiped, the output folder gone for a while."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress

from tests.faults.cluster import Cluster
from tests.faults.disks import Disk
from tests.faults.fault import Fault, Stage

FULL_S = (5.0, 20.0)


def all_faults(cluster: Cluster) -> Iterator[Fault]:
    if cluster.disk.is_small:
        yield Fault(kind="store full", victim="", run=full(cluster.disk))
    for node in cluster.nodes:
        if node.disk.is_small:
            yield Fault(kind="spool full", victim=node.name, run=full(node.disk))
        yield Fault(kind="spool wiped", victim=node.name, run=wipe(node.number))
        yield Fault(kind="spool folder removed", victim=node.name, run=remove(node.number), weight=0.5)
    yield Fault(kind="output folder away", victim="", run=away())


def full(disk: Disk, seconds: float | None = None) -> Callable[[Stage], None]:
    """Not a byte is left for a while."""

    def run(stage: Stage) -> None:
        lasts = stage.dice.choice(FULL_S) if seconds is None else seconds
        try:
            for _ in range(int(lasts)):
                disk.fill()  # again: what others free meanwhile is taken too
                if stage.over.wait(1.0):
                    break
        finally:
            disk.empty()

    return run


def wipe(number: int) -> Callable[[Stage], None]:
    """Every file of the spool deleted at once, and for a while each that comes."""

    def run(stage: Stage) -> None:
        node = stage.cluster.nodes[number - 1]
        for _ in range(stage.dice.choice((1, 20))):
            for path in list(node.spool.glob("*")):
                with suppress(FileNotFoundError):
                    path.unlink()
            stage.last(0.1)

    return run


def remove(number: int) -> Callable[[Stage], None]:
    """The folder itself gone, as after a cleaner of temporary files."""

    def run(stage: Stage) -> None:
        shutil.rmtree(stage.cluster.nodes[number - 1].spool, ignore_errors=True)

    return run


def away(seconds: float | None = None) -> Callable[[Stage], None]:
    """The output folder renamed away and back, as a mount that comes and goes; nobody may make another."""

    def run(stage: Stage) -> None:
        out = stage.cluster.out
        hidden = out.with_name("away")
        with stage.job.quiet():  # who enqueues into an empty folder is right to begin a run there
            out.rename(hidden)
            try:
                stage.last(stage.dice.choice((3.0, 20.0)) if seconds is None else seconds)
            finally:
                made = sorted(path.name for path in out.rglob("*")) if out.exists() else None
                assert made is None, f"somebody made the output folder anew: {made}"
                hidden.rename(out)

    return run
