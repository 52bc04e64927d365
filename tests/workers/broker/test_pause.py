"""A pause of a lane: how long, and until when."""

from workers.lane.pause import FIRST_S, LONGEST_S, Pause


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def length(pause: Pause, clock: Clock) -> float:
    """How long the pause that begins now lasts, to a quarter of a second."""
    pause.begin("full")
    began = clock.now
    while pause.on:
        clock.now += 0.25
    return clock.now - began


def test_pauses_grow_until_an_order_succeeds() -> None:
    clock = Clock()
    pause = Pause(clock)
    assert [length(pause, clock) for _ in range(6)] == [2, 4, 8, 16, LONGEST_S, LONGEST_S]
    pause.succeeded()
    assert length(pause, clock) == FIRST_S


def test_orders_that_fail_together_begin_one_pause() -> None:
    clock = Clock()
    pause = Pause(clock)
    for _ in range(50):
        pause.begin("full")
    clock.now += FIRST_S
    assert not pause.on
    assert pause.why == "full", "until somebody has looked"


def test_a_pause_goes_on_while_its_reason_lasts_and_ends_with_it() -> None:
    clock = Clock()
    pause = Pause(clock)
    pause.begin("full")
    for _ in range(20):
        clock.now += 1.5
        pause.go_on()
        assert pause.on
    clock.now += FIRST_S
    pause.clear()
    assert not pause.on
    assert pause.why == ""


def test_a_pause_that_is_repeated_for_a_day_is_still_a_pause() -> None:
    clock = Clock()
    pause = Pause(clock)
    for _ in range(3000):
        pause.begin("full")
        assert pause.on
        clock.now += LONGEST_S
    assert not pause.on
