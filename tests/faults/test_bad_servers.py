"""Servers that die, hang, refuse or spoil their replies: nothing wrong is stored, no sample given up."""

import pytest

from tests.faults import bad_servers
from tests.faults.cluster import HURRIED, Shape, until
from tests.faults.spoiling import ALL
from tests.faults.trial import Trial
from workers.board.processes import ServerState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SHAPE = Shape(engines=2, timing=HURRIED)


@pytest.mark.parametrize("way", ALL)
def test_a_spoiled_reply_is_refused_and_asked_again(trial: Trial, way: str) -> None:
    before = sum(proxy.spoiled[way] for proxy in trial.cluster.proxies)
    trial.survives(bad_servers.spoiling((way,)), prompts=40)
    assert sum(proxy.spoiled[way] for proxy in trial.cluster.proxies) > before


def test_a_dead_server_takes_no_calls_and_comes_back_by_itself(trial: Trial) -> None:
    trial.survives(bad_servers.dead(0, 8))
    until(lambda: states_of(trial) == {ServerState.UP}, "both servers are up again")


def test_all_servers_gone_and_back_lose_nothing(trial: Trial) -> None:
    trial.survives(bad_servers.all_gone)


def test_a_server_that_says_503_costs_no_attempt(trial: Trial) -> None:
    trial.survives(bad_servers.behaving(0, "unavailable", 15))


def test_a_slow_server_is_waited_for(trial: Trial) -> None:
    trial.survives(bad_servers.behaving(0, "slow", 10))


def test_a_server_that_hangs_with_its_health_at_200_is_left_and_its_calls_go_to_another(trial: Trial) -> None:
    trial.is_broken = True
    trial.begin()
    trial.cluster.proxies[0].mode = "hang"
    # nobody frees the calls that hang: they end because the lanes find out
    trial.ends_well(within_s=240)
    trial.cluster.proxies[0].mode = "pass"
    until(lambda: states_of(trial) == {ServerState.UP}, "a probe brings it back")
    trial.is_broken = False


def test_a_server_that_came_back_with_another_model_takes_no_calls(trial: Trial) -> None:
    trial.survives(bad_servers.another(0))


def test_calls_whose_connections_break_on_a_living_server_are_made_again(trial: Trial) -> None:
    trial.survives(bad_servers.cut)


def states_of(trial: Trial) -> set[ServerState]:
    seen = trial.cluster.glance()
    return {s.state for p in (seen.processes if seen else ()) for s in p.servers}
