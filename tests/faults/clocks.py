"""Wall clocks that jump: the first node's workers have one that can be moved."""

from collections.abc import Callable, Iterator

from tests.faults.cluster import Cluster
from tests.faults.fault import Fault, Stage

JUMPS_S = (-3600, -50, 50, 3600)


def all_faults(cluster: Cluster) -> Iterator[Fault]:
    if cluster.shape.clocks:
        yield Fault(kind="clock jumps", victim="node1", run=jump(), weight=2)


def jump(seconds: int | None = None, lasts_s: float = 20.0) -> Callable[[Stage], None]:
    """The clock of the first node is off for a while, and right again."""

    def run(stage: Stage) -> None:
        clock = stage.cluster.nodes[0].clock
        by = stage.dice.choice(JUMPS_S) if seconds is None else seconds
        clock.write_text(str(by))
        stage.last(lasts_s)
        clock.write_text("0")

    return run
