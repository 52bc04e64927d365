"""One Redis database carries one unfinished run; its view is read back as it was published."""

from pathlib import Path

import pytest
import redis

from storage.errors import UnsuitableError
from storage.run import Run, StatesMode
from storage.settings import DatasetSettings
from tests.workers.sink.making import make_settings, make_spec
from workers.broker.keys import RUN, SETTINGS, WINDOW
from workers.runs import RunView, claim, claim_if_absent, finish, publish_view, read_carried, read_view

ONE, OTHER = Run(id="1" * 32, spec=make_spec()), Run(id="2" * 32, spec=make_spec(StatesMode.OFF))


def test_a_claimed_run_is_read_back(client: redis.Redis) -> None:
    assert read_carried(client) is None
    claim(client, ONE, Path("/out"))
    carried = read_carried(client)
    assert (carried.run, carried.output_dir, carried.finished) == (ONE, "/out", False)


def test_an_unfinished_run_is_not_replaced(client: redis.Redis) -> None:
    claim(client, ONE, "/out")
    with pytest.raises(UnsuitableError, match="carries the run of `/out`") as caught:
        claim(client, OTHER, "/other")
    assert caught.value.code == "redis.other_run"
    assert read_carried(client).run == ONE


def test_a_finished_run_is_replaced_with_all_that_was_said_of_it(client: redis.Redis) -> None:
    claim(client, ONE, "/out")
    client.hset(WINDOW, "x", "B1")
    client.set(SETTINGS, "{}")
    assert finish(client, ONE.id)
    claim(client, OTHER, "/other")
    assert read_carried(client).run == OTHER
    assert not client.exists(WINDOW, SETTINGS)


def test_a_run_that_is_claimed_again_is_unfinished_again_and_keeps_its_window(client: redis.Redis) -> None:
    claim(client, ONE, "/out")
    client.hset(WINDOW, "x", "B1")
    finish(client, ONE.id)
    claim(client, ONE, "/moved")
    assert not read_carried(client).finished
    assert read_carried(client).output_dir == "/moved"
    assert client.exists(WINDOW)


def test_a_sink_replaces_no_run_not_even_a_finished_one(client: redis.Redis) -> None:
    claim(client, ONE, "/out")
    finish(client, ONE.id)
    claim_if_absent(client, ONE, "/out")
    assert read_carried(client).finished
    with pytest.raises(UnsuitableError):
        claim_if_absent(client, OTHER, "/other")


def test_only_the_run_that_is_carried_can_be_finished(client: redis.Redis) -> None:
    claim(client, ONE, "/out")
    assert not finish(client, OTHER.id)
    assert finish(client, ONE.id)
    assert not finish(client, ONE.id)
    assert finish(client, ONE.id, finished=False)


@pytest.mark.parametrize("states", list(StatesMode))
def test_a_view_is_read_back_as_it_was_published(client: redis.Redis, states: StatesMode) -> None:
    settings = make_settings(states, B1=DatasetSettings(max_samples=3), A1=DatasetSettings(max_tokens=9))
    view = RunView(run=ONE, settings=settings, output_dir="/out", closed=frozenset({"B1"}))
    publish_view(client, view)
    assert read_view(client) == view


@pytest.mark.parametrize("garbage", ["", "[]", "{}", "nonsense", '{"run": 3}'])
def test_what_is_no_run_and_no_view_is_read_as_none(client: redis.Redis, garbage: str) -> None:
    client.set(RUN, garbage)
    client.set(SETTINGS, garbage)
    assert read_carried(client) is None
    assert read_view(client) is None


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"7", b"[]", b'"x"', b"{}", b'{"id": 3}', b"\xff\x00"])
def test_what_is_no_record_of_a_run_is_in_nobodys_way(client: redis.Redis, garbage: bytes) -> None:
    client.set(RUN, garbage)
    assert read_carried(client) is None
    assert not finish(client, ONE.id)
    claim_if_absent(client, ONE, "/out")
    assert read_carried(client).run == ONE
    client.set(RUN, garbage)
    claim(client, OTHER, "/other")
    assert read_carried(client).run == OTHER
