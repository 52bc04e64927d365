"""Redis restarted, away, standing still or emptied while a job runs: the job ends as if it had not been."""

import pytest

from tests.faults import redis_away
from tests.faults.trial import Trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_redis_restarted_in_mid_run_loses_nothing(trial: Trial) -> None:
    trial.survives(redis_away.restart)


@pytest.mark.parametrize("seconds", redis_away.OUTAGES_S)
def test_calls_that_end_while_redis_is_away_are_stored_when_it_is_back(trial: Trial, seconds: float) -> None:
    trial.survives(redis_away.down(seconds))


@pytest.mark.parametrize("seconds", redis_away.OUTAGES_S)
def test_a_redis_that_accepts_and_does_not_answer_is_waited_for(trial: Trial, seconds: float) -> None:
    trial.survives(redis_away.standing(seconds))


def test_results_that_redis_took_as_it_died_are_stored_once(trial: Trial) -> None:
    trial.survives(redis_away.down_as_results_come)


def test_every_connection_cut_over_and_over_loses_nothing(trial: Trial) -> None:
    def cut(stage) -> None:
        for _ in range(8):
            redis_away.drop_clients(stage)
            stage.last(0.5)

    trial.survives(cut)


def test_a_redis_that_was_emptied_in_mid_run_loses_no_sample(trial: Trial) -> None:
    trial.survives(redis_away.flush)


def test_a_redis_that_came_back_without_its_data_loses_no_sample(trial: Trial) -> None:
    trial.survives(redis_away.lose_data)
