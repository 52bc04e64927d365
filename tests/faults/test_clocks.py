"""Wall clocks that jump on one node: nothing is lost, twice or torn, and nothing waits for that hour."""

import pytest

from tests.faults import clocks
from tests.faults.cluster import HURRIED, Shape
from tests.faults.fault import Stage
from tests.faults.killing import killed
from tests.faults.trial import Trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SHAPE = Shape(
    nodes=(("short", "capture", "sink"), ("short", "capture", "sink")),
    engines=2,
    timing=HURRIED,
    clocks=True,
)


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_clock_that_jumps_an_hour_and_back_loses_and_doubles_nothing(trial: Trial, seconds: int) -> None:
    trial.survives(clocks.jump(seconds, 10))


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_orders_of_a_lane_killed_while_its_clock_was_wrong_do_not_wait_for_that_hour(
    trial: Trial, seconds: int
) -> None:
    def kill(stage: Stage) -> None:
        clock = stage.cluster.nodes[0].clock
        clock.write_text(str(seconds))
        stage.last(3)  # leases are renewed by the wrong clock
        killed("short@node1").run(stage)
        killed("capture@node1").run(stage)
        clock.write_text("0")

    trial.survives(kill)
