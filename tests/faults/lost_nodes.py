"""A node that is gone with all its processes, and its spool's files for good; later it comes back."""

import shutil
from collections.abc import Callable, Iterator

from tests.faults.cluster import Cluster
from tests.faults.fault import Fault, Stage

GONE_S = 135.0
"""Longer than the 120 s after which its results are given up."""


def all_faults(cluster: Cluster, spared: frozenset[str] = frozenset()) -> Iterator[Fault]:
    for node in cluster.nodes[1:] if len(cluster.nodes) > 1 else ():
        victims = [name for name in cluster.workers() if name.endswith(f"@{node.name}")]
        if not spared & set(victims):
            yield Fault(kind="node gone with its spool", victim=node.name, run=gone(node.number), weight=0.5)


def gone(number: int, seconds: float = GONE_S, *, with_spool: bool = True) -> Callable[[Stage], None]:
    """All of the node's workers killed at once and down; its server goes on and fills the spool."""

    def run(stage: Stage) -> None:
        cluster = stage.cluster
        node = cluster.nodes[number - 1]
        names = [name for name in cluster.workers() if name.endswith(f"@{node.name}")]
        for name in names:
            cluster[name].held = True
        for name in names:
            cluster.supervisor.hold(name)
        if with_spool:
            shutil.rmtree(node.spool, ignore_errors=True)
        stage.last(seconds)
        for name in names:
            cluster.supervisor.release(name)

    return run
