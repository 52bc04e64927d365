"""What the charts show of samples whose speeds are known: steady ones, gaps, restarts, an ended run."""

import dataclasses

import pytest

from tests.workers.flower.test_history import SAMPLE
from workers.board.history import LaneSample, Sample, ServerSample
from workers.flower.series import MOMENTS, series

START = 1_000_000.0


def steady(count: int, step: float = 5.0, per_s: int = 50) -> list[Sample]:
    """A run that makes 50 tokens a second, and twice as many prompt tokens."""
    return [
        dataclasses.replace(
            SAMPLE,
            at=START + at * step,
            output_tokens=int(at * step * per_s),
            prompt_tokens=int(at * step * per_s * 2),
            samples=int(at * step),
            spool_bytes=at,
        )
        for at in range(count)
    ]


def test_a_steady_run_has_one_speed_throughout() -> None:
    samples = steady(181)
    shown = series(samples, START, samples[-1].at)
    assert len(shown["times"]) == MOMENTS
    assert shown["times"][-1] == samples[-1].at
    assert shown["output"][1:] == [pytest.approx(50)] * (MOMENTS - 1)
    assert shown["prompt"][1:] == [pytest.approx(100)] * (MOMENTS - 1)
    assert shown["samples"][1:] == [pytest.approx(1)] * (MOMENTS - 1)
    assert shown["spool"][-1] == 180


def test_a_day_of_a_steady_run_has_the_same_speed_in_as_many_moments() -> None:
    samples = steady(1441, step=60.0)
    shown = series(samples, START, samples[-1].at)
    assert len(shown["times"]) == MOMENTS
    assert shown["output"][1:] == [pytest.approx(50)] * (MOMENTS - 1)


def test_a_while_without_a_feeder_is_a_gap() -> None:
    samples = steady(60)
    kept = samples[:20] + samples[50:]
    shown = series(kept, START, kept[-1].at)
    at = dict(zip(shown["times"], zip(shown["output"], shown["spool"], strict=True), strict=True))
    inside = [value for time, value in at.items() if samples[25].at < time < samples[49].at]
    assert inside
    assert set(inside) == {(None, None)}
    assert at[kept[-1].at] == (pytest.approx(50), 59)


def test_counters_that_began_anew_are_no_negative_speed() -> None:
    samples = steady(20)
    restarted = [dataclasses.replace(one, at=one.at + 100) for one in steady(20)]
    shown = series(samples + restarted, START, restarted[-1].at)
    assert min(value for value in shown["output"] if value is not None) >= 0


def test_one_sample_has_values_and_no_speed() -> None:
    shown = series(steady(1), START, START)
    assert (shown["output"], shown["spool"]) == ([None], [0])


def test_without_samples_there_is_nothing() -> None:
    shown = series((), 0.0, 0.0)
    assert (shown["times"], shown["output"], shown["lanes"], shown["over"]) == ([], [], {}, False)


def test_lanes_and_servers_come_and_go() -> None:
    samples = steady(40)
    samples[20:] = [
        dataclasses.replace(
            one,
            lanes={"capture": LaneSample(in_flight=4, limit=8, waiting=2), **one.lanes},
            servers={"http://s": ServerSample(in_flight=5, kv_used=0.5, retractions=0)},
        )
        for one in samples[20:]
    ]
    shown = series(samples, START, samples[-1].at)
    assert list(shown["lanes"]) == ["short", "capture"]
    assert shown["lanes"]["capture"]["limit"][0] is None
    assert shown["lanes"]["capture"]["limit"][-1] == 8
    assert shown["servers"]["http://s"]["kv_used"][-1] == 0.5
    assert {len(column) for lane in shown["lanes"].values() for column in lane.values()} == {
        len(shown["times"])
    }


def test_a_run_that_ended_is_said_to_be_over() -> None:
    samples = steady(10)
    samples[-1] = dataclasses.replace(samples[-1], finished=True)
    assert series(samples, START, samples[-1].at)["over"]
