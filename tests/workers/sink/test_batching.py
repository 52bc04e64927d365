"""When a batch is due: by size, by age, by idleness; what it holds and in which order."""

import dataclasses

import pytest

from storage.sample import SpoolRef, States
from tests.workers.sink.making import make_failure, make_prompts, make_response
from workers.broker.messages import Captured, Failed, Responded
from workers.sink.batching import BATCH_BYTES, BATCH_MESSAGES, HELD_BYTES, SMALL, STATES, Batcher, Held

PROMPT = make_prompts("B1", 1)[0]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def small(at: int = 0) -> Held:
    return Held(result=Failed(run="r", failure=make_failure(PROMPT)), message_bytes=100, delivery=at)


def states(megabytes: float, at: int = 0) -> Held:
    rows = max(1, int(megabytes * 1e6) // 32)
    found = States(
        id=PROMPT.id,
        digest=bytes(16),
        dataset="B1",
        capture="eagle3",
        spool=SpoolRef(node="n", name="x", shape=(rows, 2, 8), crc32=0),
        facts_id="f",
        hs_indices=(1, 2),
        norm="none",
    )
    return Held(result=Captured(run="r", states=found), message_bytes=100, delivery=at)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def batcher(clock: Clock) -> Batcher:
    return Batcher(clock)


def test_nothing_is_due_when_nothing_is_held(batcher: Batcher) -> None:
    assert batcher.take(0) == []


def test_small_results_are_due_when_no_more_come(batcher: Batcher, clock: Clock) -> None:
    batcher.add(small(1))
    assert batcher.take(0) == []
    clock.now += SMALL.idle_s
    assert [held.delivery for held in batcher.take(0)] == [1]
    assert batcher.take(0) == []


def test_small_results_are_due_by_age_while_more_come(batcher: Batcher, clock: Clock) -> None:
    for _ in range(10):
        batcher.add(small())
        clock.now += SMALL.least_s / 8
    assert len(batcher.take(0)) == 10


def test_the_longer_a_sink_is_busy_the_longer_it_collects() -> None:
    assert SMALL.age_s(0) == SMALL.least_s
    assert SMALL.age_s(100) == 10
    assert SMALL.age_s(1e6) == SMALL.most_s
    assert STATES.age_s(1e6) == 60


def test_states_wait_longer_and_bring_the_small_ones_along(batcher: Batcher, clock: Clock) -> None:
    batcher.add(states(1, 1))
    clock.now += STATES.idle_s - 0.1
    batcher.add(small(2))
    clock.now += 0.1
    assert [held.delivery for held in batcher.take(0)] == [2, 1]


def test_a_gigabyte_is_due_at_once_and_a_batch_is_no_bigger(batcher: Batcher) -> None:
    for at in range(4):
        batcher.add(states(0.3 * BATCH_BYTES / 1e6, at))
    assert [held.delivery for held in batcher.take(0)] == [0, 1, 2]


def test_one_sample_bigger_than_a_batch_goes_alone(batcher: Batcher) -> None:
    batcher.add(states(1.5 * BATCH_BYTES / 1e6, 1))
    batcher.add(states(1, 2))
    assert [held.delivery for held in batcher.take(0)] == [1]


def test_many_messages_are_due_at_once(batcher: Batcher) -> None:
    for at in range(BATCH_MESSAGES + 5):
        batcher.add(small(at))
    assert len(batcher.take(0)) == BATCH_MESSAGES


def test_inline_results_lie_with_the_states(batcher: Batcher, clock: Clock) -> None:
    response = make_response(PROMPT)
    inline = states(1).result.states
    batcher.add(Held(result=Responded(run="r", response=response, states=inline), message_bytes=1))
    clock.now += SMALL.idle_s
    assert batcher.take(0) == []
    clock.now += STATES.idle_s
    assert len(batcher.take(0)) == 1


def test_messages_that_hold_too_many_bytes_leave_no_room(batcher: Batcher, clock: Clock) -> None:
    batcher.add(dataclasses.replace(small(), message_bytes=HELD_BYTES))
    assert not batcher.has_room
    clock.now += 100
    batch = batcher.take(0)
    assert not batcher.has_room, "being committed, they are held still"
    assert len(batcher) == 1
    batcher.done(batch)
    assert batcher.has_room
    assert len(batcher) == 0


def test_what_is_dropped_is_not_committed(batcher: Batcher, clock: Clock) -> None:
    batcher.add(small())
    batcher.add(states(1))
    assert len(batcher.drop()) == 2
    clock.now += 1000
    assert batcher.take(0) == []
    assert batcher.has_room
