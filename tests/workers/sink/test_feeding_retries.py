"""Retries in the feeder: published once each, and the run is unfinished until they have an outcome."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from storage.retries import Retry
from storage.sample import Stage
from storage.settings import read_settings, write_settings
from storage.spool import Spool
from tests.workers.sink.making import make_failure, make_response, make_store
from tests.workers.sink.test_feeder import Stage1
from workers.broker.messages import Capture, Failed, Generate, decode, encode
from workers.runs import read_carried
from workers.sglang.execute import dead_letter


@pytest.fixture
def stage(tmp_path: Path, spool: Spool, client: redis.Redis) -> Iterator[Stage1]:
    """Four prompts; one has failed to be generated, one response has failed to be captured."""
    s = Stage1(make_store(tmp_path / "out", {"B1": 4}), spool, client)
    orders = s.step()
    first, second, *others = [s.store.prompt("B1", at) for at in range(4)]
    response = make_response(second)
    s.store.commit_failures([make_failure(first)])
    s.store.commit_responses([response, *(make_response(each) for each in others)])
    captures = [order for order in s.step() if isinstance(order, Capture)]
    bad = next(order for order in captures if order.id == second.id)
    s.store.commit_failures([dead_letter(bad, code="states.short", said="no", attempts=3).failure])
    s.work([order for order in captures if order.id != second.id])
    assert s.step() == []
    assert len(orders) == 4
    assert finished(s)
    with s.role:
        yield s


def finished(s: Stage1) -> bool:
    carried = read_carried(s.client)
    assert carried is not None
    return carried.finished


def ask(s: Stage1, **what: tuple[str, ...]) -> None:
    settings = read_settings(s.store.path)
    retry = Retry(number=len(settings.retries) + 1, **what)
    write_settings(s.store.path, replace(settings, retries=(*settings.retries, retry)))


def failing_again(order: Generate | Capture) -> Failed:
    """What a lane publishes of an order that fails: through the bytes of both messages."""
    received = decode(encode(order))
    assert isinstance(received, Generate | Capture)
    result = decode(encode(dead_letter(received, code="server.slow", said="again", attempts=3)))
    assert isinstance(result, Failed)
    return result


def test_a_finished_run_is_unfinished_until_what_is_tried_again_has_its_outcome(stage: Stage1) -> None:
    ask(stage)
    again = stage.step()
    assert sorted(type(order).__name__ for order in again) == ["Capture", "Generate"]
    assert not finished(stage)
    assert stage.step() == [], "once"
    stage.work(again)
    stage.work(stage.step())
    assert stage.step() == []
    assert finished(stage)
    assert len(list(stage.store.failures())) == 2


def test_what_fails_again_is_published_no_third_time(stage: Stage1) -> None:
    ask(stage)
    again = stage.step()
    stage.store.commit_failures([failing_again(order).failure for order in again])
    for _ in range(3):
        assert stage.step(10.0) == []
    assert finished(stage)
    assert sorted((f.code, f.retry) for f in stage.store.failures()) == [
        ("server.refused", 0),
        ("server.slow", 1),
        ("server.slow", 1),
        ("states.short", 0),
    ]


def test_a_retry_means_only_what_it_names(stage: Stage1) -> None:
    ask(stage, codes=("states.short",))
    (order,) = stage.step()
    assert isinstance(order, Capture)
    stage.store.commit_failures([failing_again(order).failure])
    assert stage.step() == []
    ask(stage, ids=(stage.store.prompt("B1", 0).id.hex(),))
    (order,) = stage.step()
    assert isinstance(order, Generate)
    stage.work([order])
    stage.work(stage.step())
    assert stage.step() == []
    assert finished(stage)
    standing = [f for f in stage.store.failures() if f.stage is Stage.CAPTURE]
    assert [(f.code, f.retry) for f in standing] == [("states.short", 0), ("server.slow", 1)]


def test_a_feeder_that_takes_over_publishes_a_retry_no_second_time(stage: Stage1) -> None:
    ask(stage)
    assert len(stage.step()) == 2
    stage.feeder = stage.new_feeder()
    assert stage.step() == []
