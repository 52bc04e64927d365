"""A node that is gone for good: its results are made again elsewhere, and back, it sweeps its spool."""

import pytest

from tests.faults import lost_nodes
from tests.faults.cluster import HURRIED, Shape, until
from tests.faults.fault import Stage
from tests.faults.trial import Trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
SHAPE = Shape(nodes=(("short", "capture", "sink"), ("short", "capture", "sink")), engines=2, timing=HURRIED)


def test_two_nodes_share_a_run_and_each_stores_its_own_states(trial: Trial) -> None:
    trial.survives(lambda stage: None)
    nodes = {path.name.split("-")[1] for path in (trial.cluster.out / "states" / "eagle3").glob("s-*")}
    assert nodes == {"node1", "node2"}


def test_results_of_a_node_that_is_gone_with_its_spool_are_made_again(trial: Trial) -> None:
    def lose(stage: Stage) -> None:
        # its server stays, and goes on naming files in a spool that no sink reads
        until(lambda: stage.cluster.nodes[1].files(), "states lie in its spool")
        lost_nodes.gone(2)(stage)

    trial.survives(lose, within_s=240)


def test_the_run_finishes_while_the_node_is_still_gone(trial: Trial) -> None:
    trial.is_broken = True
    trial.begin()
    names = [name for name in trial.cluster.workers() if name.endswith("@node2")]
    for name in (*names, "engine2"):
        trial.cluster.supervisor.hold(name)
    while not trial.job.keep_asking():
        pass
    trial.job.finish(300)
    for name in ("engine2", *names):
        trial.cluster.supervisor.release(name)
    trial.cluster.wait_until_ready()
    trial.ends_well()
    trial.is_broken = False
