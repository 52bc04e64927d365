"""What the page says in a real Chromium when there is little to show, or what there is is old."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from storage.run import StatesMode
from tests.browser.conftest import Browser
from tests.workers.flower.flower_process import Flower, running_flower
from tests.workers.flower.looks import BOARD, lane_process
from tests.workers.sink.making import make_store
from workers.board.board import write_board
from workers.board.processes import write_process
from workers.runs import claim

pytestmark = [pytest.mark.browser, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def flower(redis_server: str, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    with running_flower(tmp_path_factory.mktemp("flower"), redis_server) as flower:
        browser.look(width=1000)
        yield flower


def test_without_a_run_it_says_how_to_begin_one(browser: Browser, flower: Flower, redis_url: str) -> None:
    browser.open(flower.url + "/throughput")
    browser.until(lambda: browser.text("#tp-empty-title") == "No run", "no run")
    assert "`producer enqueue` begins one" in browser.text("#tp-empty-says")
    assert browser.run("return document.getElementById('tp-body').offsetHeight") == 0
    assert browser.text("#tp-banner") == ""
    assert browser.text("#tp-live").startswith("Live")


def test_what_comes_is_shown_without_loading_and_what_is_wrong_is_said(
    browser: Browser, flower: Flower, redis_url: str, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "out", {"B2": 3}, states=StatesMode.OFF)
    board = dataclasses.replace(BOARD, run_id=store.run.id)
    browser.open(flower.url + "/throughput")
    with redis.Redis.from_url(redis_url) as client:
        claim(client, store.run, store.path)
        browser.until(lambda: "no feeder" in browser.text("#tp-empty-says"), "a run without a feeder")

        write_board(client, dataclasses.replace(board, at=time.time() + 1000))
        browser.until(lambda: "No lane worker is up" in browser.text("#tp-banner"), "no lane")
        assert browser.text("#tp-progress") == "80 of 200"
        assert browser.text("#tp-output") == "813 tok/s"
        assert browser.rows("tp-failures") == [["server.refused", "2", "B2 2"]]
        assert "its rows differ" in browser.text("#tp-alarms")
        assert browser.text("#tp-checks-sub") == "1 sample has an alarm"
        assert browser.text("#tp-notes") == "server http://gpu2:30000 is away: refused"
        assert browser.rows("tp-sinks") == [["No sink is up: nothing is stored."]]
        assert [row[1].split("\n")[0] for row in browser.rows("tp-servers")] == ["up", "away"]
        lane = lane_process("short@a", "short", {"http://gpu1:30000": 31})
        write_process(client, lane)
        browser.until(lambda: browser.text("#tp-banner") == "", "all is well")
        assert browser.rows("tp-servers")[0][4].startswith("87 %")

        write_board(client, dataclasses.replace(board, at=time.time() - 60))
        browser.until(lambda: "these figures are old" in browser.text("#tp-banner"), "nobody feeds")
        assert browser.text("#tp-live") == "Figures are 1 min old"


def test_a_redis_that_never_answered_is_said_to_be_away(browser: Browser, tmp_path: Path) -> None:
    with running_flower(tmp_path, "redis://127.0.0.1:1/0") as flower:
        browser.open(flower.url + "/throughput")
        browser.until(lambda: browser.text("#tp-empty-title") == "Redis does not answer", "away")
        assert browser.text("#tp-live") == "Redis does not answer"
