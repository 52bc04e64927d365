"""What a real feeder writes for those who watch: time left, dead letters, bytes, sums and history."""

import time
from pathlib import Path

import pytest
import redis

from storage.run import StatesMode
from storage.store import Store
from tests.workers.sink.making import make_failure, make_prompts, make_response, make_store
from workers.board.board import Board, read_board
from workers.board.history import ends_of_history, read_history
from workers.board.processes import ProcessSnapshot, forget_process, write_process
from workers.board.tally import read_tally
from workers.feeder.feeder import Feeder
from workers.feeder.role import Role
from workers.runs import claim


class Clock:
    """The feeder's, moved by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url)


@pytest.fixture
def store(tmp_path: Path, client: redis.Redis) -> Store:
    store = make_store(tmp_path / "out", {"B1": 40, "B2": 40}, states=StatesMode.OFF)
    claim(client, store.run, store.path)
    return store


def feeder_of(store: Store, client: redis.Redis, clock: Clock, name: str = "one") -> Feeder:
    role = Role(client, name)
    assert role.take()
    return Feeder(store=store, redis=client, publish=lambda messages: None, role=role, clock=clock)


def step(feeder: Feeder, clock: Clock, client: redis.Redis, seconds: float = 2.0) -> Board:
    clock.now += seconds
    feeder.step()
    while feeder.more:
        feeder.step()
    board = read_board(client)
    assert board is not None
    return board


def lane(started: float, **counts: int) -> ProcessSnapshot:
    return ProcessSnapshot(
        name="short@n", lane="short", node="n", pid=1, at=time.time(), started=started, **counts
    )


def test_each_dataset_has_its_own_time_left(store: Store, client: redis.Redis) -> None:
    """Ten samples of B1 in ten seconds leave thirty; of B2 nothing is known."""
    clock = Clock()
    feeder, prompts = feeder_of(store, client, clock), make_prompts("B1", 40)
    step(feeder, clock, client)
    for at in range(10):
        store.commit_responses([make_response(prompts[at])])
        board = step(feeder, clock, client, seconds=1.0)
    one, two = board.datasets
    assert one.left_s == pytest.approx(30, rel=0.15)
    assert two.left_s is None


def test_dead_letters_and_bytes_are_those_of_the_store(store: Store, client: redis.Redis) -> None:
    clock = Clock()
    feeder, prompts = feeder_of(store, client, clock), make_prompts("B2", 40)
    before = step(feeder, clock, client)
    store.commit_failures([make_failure(prompt, "reply.short") for prompt in prompts[:2]])
    store.commit_failures([make_failure(prompts[2], "server.refused")])
    after = step(feeder, clock, client, seconds=6.0)
    assert after.datasets[0].dead_letters == {}
    assert after.datasets[1].dead_letters == {"reply.short": 2, "server.refused": 1}
    assert before.stored_bytes is not None
    assert after.stored_bytes is not None
    grown = sum(path.stat().st_size for path in (store.path / "failures").glob("s-*/**/*") if path.is_file())
    assert after.stored_bytes - before.stored_bytes == grown


def test_sums_go_on_over_restarts_of_lane_and_feeder(store: Store, client: redis.Redis) -> None:
    clock = Clock()
    feeder = feeder_of(store, client, clock)
    write_process(client, lane(1.0, tokens=100, prompt_tokens=30))
    step(feeder, clock, client)
    write_process(client, lane(2.0, tokens=5, prompt_tokens=1))
    step(feeder, clock, client)
    client.delete("eyas:feeder")
    after = feeder_of(store, client, clock, "another")
    step(after, clock, client)
    write_process(client, lane(2.0, tokens=25, prompt_tokens=6))
    step(after, clock, client)
    forget_process(client, "short@n")
    step(after, clock, client)
    tally = read_tally(client, store.run.id)
    assert (tally.output_tokens, tally.prompt_tokens) == (125, 36)


def test_the_history_begins_with_the_run_and_ends_with_it(store: Store, client: redis.Redis) -> None:
    clock = Clock()
    feeder = feeder_of(store, client, clock)
    step(feeder, clock, client)
    for name in ("B1", "B2"):
        store.commit_responses([make_response(prompt) for prompt in make_prompts(name, 40)])
    for _ in range(3):
        board = step(feeder, clock, client, seconds=6.0)
    assert board.finished
    ends = ends_of_history(client, store.run.id)
    assert ends is not None
    first, last = ends
    assert (first.samples, first.finished) == (0, False)
    assert (last.samples, last.finished) == (80, True)
    assert len(read_history(client, store.run.id, first.at - 1, last.at)) == 2
