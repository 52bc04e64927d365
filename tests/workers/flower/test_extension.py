"""A real Flower by the plain command: it has the page, in its own navigation and behind its own login."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from storage.run import StatesMode
from tests.workers.flower.flower_process import Flower, running_flower
from tests.workers.flower.test_history import put
from tests.workers.sink.making import make_store
from workers.runs import claim

OURS = ("/throughput", "/throughput/data", "/throughput/history", "/throughput/metrics")


@pytest.fixture(scope="module")
def flower(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    with running_flower(tmp_path_factory.mktemp("flower"), redis_server) as flower:
        yield flower


@pytest.mark.parametrize("path", ["/", "/workers", "/tasks", "/broker", "/throughput"])
def test_every_page_of_flower_leads_to_it(flower: Flower, path: str) -> None:
    page = flower.get(path)
    assert page.status == 200
    entries = re.findall(r'<a class="nav-link( active)?"\s+href="([^"]+)"', page.text)
    assert [href for _, href in entries] == ["/throughput", "/workers", "/tasks", "/broker"]
    active = [href for is_active, href in entries if is_active]
    assert active == [path] if path != "/" else active == ["/workers"]


def test_the_page_loads_nothing_that_is_not_this_flowers(flower: Flower) -> None:
    page = flower.get("/throughput").text
    loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="([^"]+)"', page)
    assert len(loaded) > 8
    for path in loaded:
        assert path.startswith("/")
        assert not path.startswith("//")
        assert flower.get(path).status == 200, path


def test_flower_has_our_columns_without_a_configuration_file(flower: Flower) -> None:
    columns = re.findall(r'data-column="(\w+)"', flower.get("/tasks").text)
    assert columns == ["name", "args", "state", "result", "runtime", "received", "worker", "uuid"]


def test_without_a_run_it_says_so(flower: Flower) -> None:
    answer = flower.get("/throughput/data")
    assert answer.headers["Cache-Control"] == "no-store"
    content = json.loads(answer.text)
    assert (content["state"], content["run"], content["totals"]) == ("none", None, None)
    assert json.loads(flower.get("/throughput/history?span=900").text)["times"] == []
    assert "eyas_run_carried 0.0" in flower.get("/throughput/metrics").text


def test_flowers_own_metrics_stay_where_they_were(flower: Flower) -> None:
    answer = flower.get("/metrics")
    assert answer.status == 200
    assert "python_info" in answer.text


@pytest.mark.parametrize("span", ["soon", "-1", "nan", "inf", "1e99", ""])
def test_a_span_that_is_none_is_refused(flower: Flower, span: str) -> None:
    assert flower.get(f"/throughput/history?span={span}").status == 400


@pytest.mark.parametrize("name", ["../extension.py", "%2e%2e/extension.py", "nothing.js", ""])
def test_only_the_pages_own_files_are_served(flower: Flower, name: str) -> None:
    assert flower.get(f"/throughput/static/{name}").status in (403, 404)


def test_the_run_and_its_history_are_there_after_a_restart_of_flower(redis_url: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "out", {"B1": 3}, states=StatesMode.OFF)
    with redis.Redis.from_url(redis_url) as client:
        claim(client, store.run, store.path)
        seconds, _ = client.time()
        for ago in (100, 95, 90, 85, 80):
            put(client, 5, seconds - ago, run=store.run.id, output_tokens=50 * (100 - ago))
    for _ in range(2):
        with running_flower(tmp_path, redis_url) as flower:
            past = json.loads(flower.get("/throughput/history?span=900").text)
            assert past["from"] == seconds - 100
            speeds = [speed for speed in past["output"] if speed is not None]
            assert speeds
            assert speeds == [pytest.approx(50)] * len(speeds)
            assert json.loads(flower.get("/throughput/data").text)["state"] == "waiting"


def test_flowers_login_covers_all_of_it(redis_url: str, tmp_path: Path) -> None:
    with running_flower(tmp_path, redis_url, "--basic_auth=ann:pass") as flower:
        for path in (*OURS, "/metrics"):
            assert flower.get(path).status == 401, path
            assert flower.get(path, login="ann:wrong").status == 401, path
            assert flower.get(path, login="ann:pass").status == 200, path


def test_a_configuration_file_wins_and_its_prefix_is_in_every_address(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text('url_prefix = "eyas"\ntasks_columns = "name,state"\n')
    with running_flower(tmp_path, redis_url, "--conf=conf.py") as flower:
        page = flower.get("/eyas/throughput").text
        addresses = re.findall(r'data-(?:now|past)="([^"]+)"', page)
        addresses += re.findall(r'(?:src|href)="([^"]*throughput[^"]*)"', page)
        assert len(addresses) > 5
        for path in addresses:
            assert path.startswith("/eyas/"), path
            assert flower.get(path).status == 200, path
        assert re.findall(r'data-column="(\w+)"', flower.get("/eyas/tasks").text) == ["name", "state"]


def test_a_redis_that_is_away_is_an_answer(tmp_path: Path) -> None:
    with running_flower(tmp_path, "redis://127.0.0.1:1/0") as flower:
        assert json.loads(flower.get("/throughput/data").text)["state"] == "away"
        assert json.loads(flower.get("/throughput/history").text)["answers"] is False
        assert "eyas_redis_up 0.0" in flower.get("/throughput/metrics").text
        assert flower.get("/throughput").status == 200
