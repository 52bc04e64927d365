"""Redis killed while calls end: their results are published when it is back, each once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from broker_stage import Stage, staged, until

from tests.own_redis import OwnRedis
from workers.broker.messages import Responded


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    own = OwnRedis(tmp_path / "redis")
    yield own
    own.kill()


@pytest.fixture
def own_stage(tmp_path: Path, own_redis: OwnRedis) -> Iterator[Stage]:
    with staged(tmp_path, own_redis.url) as stage:
        yield stage


def test_results_of_calls_that_end_while_redis_is_away_are_all_published_once(
    own_stage: Stage, own_redis: OwnRedis
) -> None:
    stage = own_stage
    stage.timing["visibility_s"] = 30
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,), concurrency={"short": 20})
    orders = stage.orders(30)
    stage.publish(orders)
    worker = stage.worker()
    until(lambda: server.stats()["in_flight"] == 20, "twenty run, ten wait")
    own_redis.kill()
    server.set(release=True, seconds=0.05)
    until(lambda: server.stats()["ended"] == 20, "all calls have ended")
    until(lambda: "publish.waiting" in worker.text(), "their results wait")
    own_redis.start()
    until(lambda: stage.waiting("sink") == 30, "every result is there")
    until(lambda: not stage.unacked() and not stage.waiting(), "and every order acknowledged", within_s=20)
    assert {r.response.id for r in stage.results() if isinstance(r, Responded)} == {o.id for o in orders}
    assert stage.waiting("sink") == 30
    assert server.stats()["started"] == 30


@pytest.mark.slow
def test_a_process_told_to_end_while_redis_is_away_is_gone_in_seconds(
    own_stage: Stage, own_redis: OwnRedis
) -> None:
    stage = own_stage
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(10))
    worker = stage.worker()
    until(lambda: server.stats()["in_flight"] == 10, "all run")
    own_redis.kill()
    server.set(release=True)
    until(lambda: "publish.waiting" in worker.text(), "their results wait")
    worker.signal(15)
    until(worker.ended, "it ends", within_s=stage.timing["drain_s"] + 2 * stage.timing["exit_s"] + 3)
    own_redis.start()
    stage.worker(name="next")
    server.set(seconds=0.05)
    until(lambda: stage.waiting("sink") >= 10 and not stage.unacked(), "another does what it held")


@pytest.mark.slow
def test_a_worker_started_before_redis_waits_for_it(own_stage: Stage, own_redis: OwnRedis) -> None:
    stage = own_stage
    server = stage.server(seconds=0.05)
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(3))
    own_redis.kill()
    worker = stage.worker()
    until(lambda: "Cannot connect" in worker.text(), "it says that Redis is away")
    own_redis.start()
    until(lambda: stage.waiting("sink") == 3, "and works when it is there")
