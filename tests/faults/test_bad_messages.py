"""What lies in a queue and is no message of ours stops nobody, and what comes twice is stored once."""

import pytest

from tests.faults import bad_messages
from tests.faults.cluster import HURRIED, Shape, until
from tests.faults.trial import Trial
from workers.broker.keys import GARBAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SHAPE = Shape(nodes=(("short", "long", "capture", "sink"),), timing=HURRIED)


def test_garbage_in_every_queue_is_set_aside_and_stops_nobody(trial: Trial) -> None:
    trial.survives(bad_messages.garbage)
    assert trial.cluster.client.llen(GARBAGE) > 0


def test_messages_of_another_version_are_set_aside_and_stop_nobody(trial: Trial) -> None:
    before = trial.cluster.client.llen(GARBAGE)
    trial.survives(bad_messages.other_version)
    until(lambda: trial.cluster.client.llen(GARBAGE) >= before + 5, "each queue's is set aside")


def test_orders_and_results_delivered_twice_are_stored_once(trial: Trial) -> None:
    def twice(stage) -> None:
        for _ in range(10):
            bad_messages.twice(stage)
            stage.last(0.3)

    trial.survives(twice)
