"""Counting calls: which server is taken, and when another order may be."""

import pytest

from workers.lane.calls import LONGEST_RAMP_S, OUTAGE_S, Calls


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(clock: Clock, grants: dict[str, int], capacity: int = 100) -> tuple[Calls, list[str]]:
    healthy = list(grants)
    calls = Calls(capacity, lambda: healthy, clock)
    calls.grant(grants, 24.0)
    return calls, healthy


def test_a_call_takes_the_server_with_the_most_free_slots(clock: Clock) -> None:
    calls, _ = made(clock, {"a": 2, "b": 5})
    assert [calls.take() for _ in range(8)].count("b") == 5
    assert calls.in_flight() == {"a": 2, "b": 5}
    assert calls.take() is None
    calls.give_back("a")
    assert calls.take() == "a"


def test_orders_that_have_no_server_yet_each_count_as_one(clock: Clock) -> None:
    calls, _ = made(clock, {"a": 3})
    assert calls.room(reserved=0) == 3
    assert calls.room(reserved=2) == 1
    calls.take()
    calls.take()
    assert calls.room(reserved=2) == 1
    assert calls.room(reserved=3) == 0


def test_room_is_never_more_than_the_pool_has_threads(clock: Clock) -> None:
    calls, _ = made(clock, {"a": 50, "b": 50}, capacity=10)
    assert calls.room(reserved=0) == 10
    assert calls.room(reserved=9) == 1


def test_a_lowered_server_does_not_keep_the_others_from_being_filled(clock: Clock) -> None:
    calls, _ = made(clock, {"a": 10, "b": 0})
    for _ in range(10):
        calls.take()
    calls.grant({"a": 0, "b": 4}, 24.0)
    assert calls.room(reserved=10) == 4
    assert calls.take() == "b"


def test_an_unhealthy_server_takes_nothing_whatever_its_slots(clock: Clock) -> None:
    calls, healthy = made(clock, {"a": 5})
    healthy.clear()
    assert calls.room(reserved=0) == 0
    assert calls.take() is None


def test_slots_that_were_not_renewed_in_time_are_gone(clock: Clock) -> None:
    calls, _ = made(clock, {"a": 5})
    clock.now += 24.0
    assert calls.room(reserved=0) == 0
    assert calls.grants() == {}
    calls.grant({"a": 5}, 24.0)
    assert calls.room(reserved=0) == 5


def test_calls_come_back_slowly_to_a_server_that_is_lost_again_and_again(clock: Clock) -> None:
    calls, _ = made(clock, {"a": 64})
    first = []
    for _ in range(10):
        calls.grant({"a": 64}, 1000.0)
        for _ in range(50):
            calls.lost("a")
        clock.now += OUTAGE_S + 0.1
        first.append(calls.room(reserved=0))
    assert first == sorted(first, reverse=True)
    assert first[-1] == 1
    clock.now += LONGEST_RAMP_S * 7
    assert calls.room(reserved=0) == 64, "and all of them once it has held out"


def test_a_server_that_flaps_for_a_day_is_still_counted(clock: Clock) -> None:
    calls, _ = made(clock, {"a": 10})
    for _ in range(3000):
        calls.lost("a")
        clock.now += OUTAGE_S + 1
    calls.grant({"a": 10}, 24.0)
    assert calls.room(reserved=0) == 1
