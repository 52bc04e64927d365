"""The history in a real Redis: a sample a step, bounded, of one run, from the step that reaches so far."""

import dataclasses
import json
from dataclasses import asdict
from itertools import pairwise

import pytest
import redis

from workers.board.history import MOST, STEPS_S, History, LaneSample, Sample, ends_of_history, read_history
from workers.broker.keys import history_key

SAMPLE = Sample(
    run="r",
    at=0.0,
    prompt_tokens=10,
    output_tokens=20,
    captured_tokens=30,
    finished=False,
    samples=1,
    failed=0,
    wasted=0,
    stored_bytes=None,
    spool_bytes=5,
    disk_free_bytes=6,
    lanes={"short": LaneSample(in_flight=1, limit=2, waiting=3)},
)


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url)


def now_of(client: redis.Redis) -> float:
    seconds, micros = client.time()
    return seconds + micros / 1e6


def put(client: redis.Redis, step: int, at: float, **fields: object) -> None:
    """A sample as it was written at another time."""
    text = json.dumps(asdict(dataclasses.replace(SAMPLE, at=at, **fields)))
    client.xadd(history_key(step), {"s": text}, id=f"{int(at * 1000)}-*")


def lengths(client: redis.Redis) -> dict[int, int]:
    return {step: client.xlen(history_key(step)) for step in STEPS_S}


def test_a_step_takes_a_sample_when_it_has_passed_and_not_before(client: redis.Redis) -> None:
    history = History(client, "r")
    history.add(SAMPLE)
    history.add(SAMPLE)
    assert lengths(client) == {5: 1, 60: 1, 600: 1}


def test_the_next_feeder_keeps_the_steps_of_the_one_before(client: redis.Redis) -> None:
    for step, ago in {5: 7, 60: 30, 600: 601}.items():
        put(client, step, now_of(client) - ago)
    History(client, "r").add(SAMPLE)
    assert lengths(client) == {5: 2, 60: 1, 600: 2}


def test_each_step_is_bounded(client: redis.Redis) -> None:
    now = now_of(client)
    for at in range(STEPS_S[5] + 20):
        put(client, 5, now - 5 * (STEPS_S[5] + 20 - at))
    History(client, "r").add(SAMPLE)
    assert client.xlen(history_key(5)) == STEPS_S[5]


def test_another_runs_history_is_dropped(client: redis.Redis) -> None:
    put(client, 5, now_of(client) - 1, run="other")
    put(client, 600, now_of(client) - 1, run="other")
    History(client, "r").add(SAMPLE)
    assert lengths(client) == {5: 1, 60: 1, 600: 1}
    assert read_history(client, "other", 0.0, now_of(client)) == ()
    assert ends_of_history(client, "other") is None


def test_a_run_that_is_over_is_written_once_more_into_every_step_and_then_never(client: redis.Redis) -> None:
    history, over = History(client, "r"), dataclasses.replace(SAMPLE, finished=True)
    for sample in (SAMPLE, over, over):
        history.add(sample)
    assert lengths(client) == {5: 2, 60: 2, 600: 2}
    History(client, "r").add(over)
    assert lengths(client) == {5: 2, 60: 2, 600: 2}
    history.add(SAMPLE)  # a cap was raised: it goes on
    history.add(over)
    assert lengths(client)[600] == 3


def test_a_clock_that_was_put_back_does_not_silence_it(client: redis.Redis) -> None:
    text = json.dumps(asdict(dataclasses.replace(SAMPLE, at=now_of(client) + 1000)))
    client.xadd(history_key(5), {"s": text})
    History(client, "r").add(SAMPLE)
    assert lengths(client)[5] == 2


def test_it_is_read_from_the_finest_step_that_reaches_and_ends_with_the_newest(client: redis.Redis) -> None:
    now = now_of(client)
    for ago in (7300, 7200, 600, 60):
        put(client, 60, now - ago)
    for ago in (20, 15, 10):
        put(client, 5, now - ago)
    near = read_history(client, "r", now - 900, now)
    assert [round(now - one.at) for one in near] == [20, 15, 10]
    far = read_history(client, "r", now - 7250, now)
    assert [round(now - one.at) for one in far] == [7200, 600, 60, 10]
    first, last = ends_of_history(client, "r")
    assert (round(now - first.at), round(now - last.at)) == (7300, 10)


def test_of_very_many_some_hundreds_are_read_evenly_with_the_newest(client: redis.Redis) -> None:
    now = now_of(client)
    pipe = client.pipeline()
    for at in range(STEPS_S[5]):
        moment = now - 5 * (STEPS_S[5] - 1 - at) - 1
        text = json.dumps(asdict(dataclasses.replace(SAMPLE, at=moment)))
        pipe.xadd(history_key(5), {"s": text}, id=f"{int(moment * 1000)}-*")
    pipe.execute()
    read = read_history(client, "r", now - 7190, now)
    assert 400 <= len(read) <= MOST + 1
    gaps = [after.at - before.at for before, after in pairwise(read)]
    assert max(gaps) <= 2 * 7190 / MOST + 5
    assert round(now - read[-1].at) == 1


def test_what_cannot_be_read_is_left_out(client: redis.Redis) -> None:
    History(client, "r").add(SAMPLE)
    for fields in ({"s": "{"}, {"x": "1"}, {"s": '{"run": "r", "at": "late"}'}):
        client.xadd(history_key(5), fields)
    (only,) = read_history(client, "r", 0.0, now_of(client))
    assert only.lanes == SAMPLE.lanes


def test_a_redis_that_lost_its_data_is_written_to_again(client: redis.Redis) -> None:
    history = History(client, "r")
    history.add(SAMPLE)
    client.flushall()
    assert read_history(client, "r", 0.0, now_of(client)) == ()
    History(client, "r").add(SAMPLE)
    assert lengths(client) == {5: 1, 60: 1, 600: 1}
