"""Killed or stopped with work in its hands, each process is made up for: nothing lost, twice or torn."""

import pytest

from tests.faults.cluster import HURRIED, Shape
from tests.faults.fault import Stage
from tests.faults.killing import kill_enqueue, killed, stop_enqueue, stopped
from tests.faults.trial import Trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SHAPE = Shape(nodes=(("short", "long", "capture", "sink", "sink.2"),), timing=HURRIED)
LANES = ("short", "long")
LEASES_S = 1.5 * HURRIED["visibility_s"]
"""Longer than a lease: what a stopped process holds is given to others meanwhile."""


@pytest.mark.parametrize("lane", ["short", "long", "capture"])
def test_a_lane_killed_with_calls_in_flight_loses_none(trial: Trial, lane: str) -> None:
    trial.survives(killed(f"{lane}@node1").run)


@pytest.mark.parametrize("lane", ["short", "capture"])
def test_a_lane_that_stood_still_for_longer_than_its_leases_stores_nothing_twice(
    trial: Trial, lane: str
) -> None:
    trial.survives(stopped(f"{lane}@node1", LEASES_S).run)


def test_a_sink_killed_with_results_in_its_hands_loses_none(trial: Trial) -> None:
    trial.survives(killed("sink@node1").run)


def test_both_sinks_killed_at_once_lose_nothing(trial: Trial) -> None:
    def kill(stage: Stage) -> None:
        killed("sink@node1").run(stage)
        stage.cluster["sink.2@node1"].kill()

    trial.survives(kill)


def test_a_sink_that_stood_still_while_the_other_took_over_commits_nothing_twice(trial: Trial) -> None:
    trial.survives(stopped("sink@node1", LEASES_S).run)


def test_a_server_killed_with_calls_in_flight_costs_time_and_no_sample(trial: Trial) -> None:
    trial.survives(killed("engine1").run)


def test_a_server_that_stood_still_costs_time_and_no_sample(trial: Trial) -> None:
    trial.survives(stopped("engine1", 10).run)


def test_redis_killed_in_mid_run_loses_no_sample(trial: Trial) -> None:
    trial.survives(killed("redis").run)


def test_enqueue_killed_at_any_moment_goes_on_when_it_is_run_again(trial: Trial) -> None:
    def kill(stage: Stage) -> None:
        for _ in range(4):
            kill_enqueue(stage)

    trial.survives(kill)


def test_enqueue_that_stood_still_while_a_sink_fed_the_run_changes_nothing(trial: Trial) -> None:
    trial.survives(stop_enqueue)


def test_everything_killed_at_once_goes_on_by_itself(trial: Trial) -> None:
    def kill(stage: Stage) -> None:
        for process in stage.cluster.supervisor.processes.values():
            process.kill()

    trial.survives(kill)
