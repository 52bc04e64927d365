"""The feeder against a real store and Redis: what it publishes, when it closes, what it notices."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import redis

from storage.run import StatesMode
from storage.sample import Finish, Stage
from storage.settings import DatasetSettings, write_settings
from storage.spool import Spool
from storage.store import Store
from tests.workers.sink.conftest import QuickHost
from tests.workers.sink.making import (
    CAPTURE,
    add_dataset,
    answer_order,
    make_failure,
    make_prompts,
    make_response,
    make_settings,
    make_store,
)
from workers.board.board import read_board
from workers.board.processes import ProcessSnapshot, write_process
from workers.board.reporting import SETTLED_S
from workers.broker.keys import FEEDER, UNACKED, WINDOW, window_field
from workers.broker.messages import Capture, Failed, Generate, Message
from workers.broker.queues import SINK
from workers.feeder.choosing import Room
from workers.feeder.feeder import AT_ONCE, Feeder
from workers.feeder.given import GIVEN_AFTER_S, GIVEN_WAITING
from workers.feeder.reconcile import APART_S, GONE_S
from workers.feeder.role import Role, RoleLostError
from workers.runs import claim, read_carried, read_view
from workers.sink.commit import Sink


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stage1:
    """A feeder, the queues it publishes to as lists, and a lane and sink that work on command."""

    def __init__(self, store: Store, spool: Spool, client: redis.Redis, room: Room | None = None) -> None:
        self.store, self.spool, self.client = store, spool, client
        self.queue: list[Message] = []
        self.clock = Clock()
        self.role = Role(client, "test")
        assert self.role.take()
        claim(client, store.run, store.path)
        self.room = room
        self.feeder = self.new_feeder()

    def new_feeder(self) -> Feeder:
        return Feeder(
            store=self.store,
            redis=self.client,
            publish=self.publish,
            role=self.role,
            room=self.room,
            clock=self.clock,
        )

    def publish(self, messages: Sequence[Message]) -> None:
        self.queue += messages

    def step(self, seconds: float = 1.0) -> list[Message]:
        """What one step published, and any that follow at once."""
        before = len(self.queue)
        self.clock.now += seconds
        self.feeder.step()
        while self.feeder.more:
            self.feeder.step()
        return self.queue[before:]

    def work(self, orders: Sequence[Message]) -> None:
        """Answer the orders and commit the results."""
        results = [answer_order(self.store, self.spool, order) for order in orders]
        sink = Sink(store=self.store, spool=self.spool, redis=self.client, host=QuickHost())
        sink.commit(results, CAPTURE)


@pytest.fixture
def stage(tmp_path: Path, spool: Spool, client: redis.Redis):
    made: list[Stage1] = []

    def make(counts: dict[str, int], room: Room | None = None, **options) -> Stage1:
        store = make_store(tmp_path / "out", counts, **options)
        made.append(Stage1(store, spool, client, room))
        return made[-1]

    yield make
    for each in made:
        each.role.release()


Make = Callable[..., Stage1]


def kinds(messages: Sequence[Message]) -> list[str]:
    return [type(message).__name__ for message in messages]


def test_a_run_goes_from_prompts_to_responses_to_states_and_is_finished(stage: Make) -> None:
    s = stage({"B1": 3})
    orders = s.step()
    assert [(type(o), o.dataset, o.lane, o.max_new_tokens) for o in orders] == [
        (Generate, "B1", "short", 64)
    ] * 3
    assert s.step() == []
    s.work(orders)
    captures = s.step()
    assert kinds(captures) == ["Capture"] * 3
    assert not read_carried(s.client).finished
    s.work(captures)
    assert s.step() == []
    assert read_carried(s.client).finished
    assert s.client.hlen(WINDOW) == 0
    board = read_board(s.client)
    assert board.finished
    assert (board.datasets[0].wanted, board.datasets[0].stored, board.datasets[0].failed) == (3, 3, 0)


def test_a_run_without_states_is_finished_with_its_responses(stage: Make) -> None:
    s = stage({"B1": 2}, states=StatesMode.OFF)
    s.work(s.step())
    assert s.step() == []
    assert read_carried(s.client).finished


def test_a_dead_letter_is_an_outcome(stage: Make) -> None:
    s = stage({"B1": 2})
    first, _ = s.step()
    s.work([first])
    s.store.commit_failures([make_failure(make_prompts("B1", 2)[1])])
    s.work(s.step())
    s.step()
    assert read_carried(s.client).finished
    assert read_board(s.client).datasets[0].failed == 1


def test_the_lane_auto_goes_by_length_and_output_leaves_room_to_capture(stage: Make) -> None:
    s = stage({}, settings=make_settings(B1=DatasetSettings()))
    add_dataset(
        s.store,
        "B1",
        [*make_prompts("B1", 1, tokens=4096), *make_prompts("B1", 1, tokens=4097)],
        lane="auto",
    )
    add_dataset(s.store, "B2", make_prompts("B2", 1, tokens=8170))
    write_settings(s.store.path, make_settings(B1=DatasetSettings(), B2=DatasetSettings()))
    found = {(o.dataset, o.lane, o.max_new_tokens) for o in s.step()}
    assert found == {("B1", "short", 64), ("B1", "long", 128), ("B2", "short", 8192 - 8170 - 1)}


def test_a_prompt_that_leaves_no_room_for_a_response_becomes_a_dead_letter(stage: Make) -> None:
    s = stage({})
    add_dataset(s.store, "B1", make_prompts("B1", 1, tokens=8192))
    write_settings(s.store.path, make_settings(B1=DatasetSettings()))
    (failed,) = s.step()
    assert isinstance(failed, Failed)
    assert failed.failure.code == "prompt.long"


def test_datasets_take_turns(stage: Make) -> None:
    s = stage({"B1": 4, "B2": 2})
    assert [o.dataset for o in s.step()] == ["B1", "B2", "B1", "B2", "B1", "B1"]


def test_the_window_is_bounded_and_refilled_as_results_are_stored(stage: Make) -> None:
    s = stage({"B1": 10}, room=Room(messages=4), states=StatesMode.OFF)
    orders = s.step()
    assert len(orders) == 4
    assert s.step() == []
    s.work(orders[:3])
    assert len(s.step()) == 3
    assert s.client.hlen(WINDOW) == 4


def test_the_window_is_bounded_by_bytes(stage: Make) -> None:
    s = stage({"B1": 10}, room=Room(size_bytes=4000), states=StatesMode.OFF)
    assert len(s.step()) == 2


def test_captures_do_not_wait_for_room_that_generating_takes(stage: Make) -> None:
    s = stage({"B1": 10}, room=Room(messages=4))
    s.work(s.step())
    assert sorted(kinds(s.step())) == ["Capture"] * 4 + ["Generate"] * 4


def test_given_responses_go_straight_to_capture(stage: Make) -> None:
    s = stage({"A1": 2}, lane="capture")
    assert s.step() == []
    prompts = make_prompts("A1", 2)
    s.store.commit_responses([make_response(p, answer=(), finish=Finish.GIVEN) for p in prompts])
    assert kinds(s.step()) == ["Capture"] * 2


def test_given_rows_that_enqueue_left_uncommitted_are_committed_later(stage: Make) -> None:
    s = stage({"A1": 2}, lane="capture")
    s.step()
    assert s.step(GIVEN_AFTER_S / 2) == []
    results = s.step(GIVEN_AFTER_S)
    assert kinds(results) == ["Responded"] * 2
    assert results[0].response.finish is Finish.GIVEN
    assert s.step() == [], "they are on their way"
    assert kinds(s.step(2 * GIVEN_AFTER_S)) == ["Responded"] * 2, "unless they were lost"


def test_given_rows_that_are_left_follow_one_another_as_fast_as_the_sinks_take_them(stage: Make) -> None:
    s = stage({"A1": 3 * AT_ONCE}, lane="capture")
    s.step()
    s.client.rpush(SINK, *["x"] * GIVEN_WAITING)
    assert s.step(GIVEN_AFTER_S) == [], "no sink takes any"
    s.client.delete(SINK)
    assert len(s.step()) == 3 * AT_ONCE


def test_no_time_left_is_told_while_no_sink_can_store(stage: Make) -> None:
    s = stage({"B1": 30})
    orders = s.step()
    for at in range(0, 20, 2):
        s.work(orders[at : at + 2])
        s.work(s.step(5.0))
    s.step(5.0)
    board = read_board(s.client)
    assert board.left_s > 0
    assert board.datasets[0].left_s > 0
    sink = ProcessSnapshot(
        name="sink@a", lane=SINK, node="a", pid=1, at=time.time(), started=0.0, state="paused", says="full"
    )
    write_process(s.client, sink)
    s.step(5.0)
    board = read_board(s.client)
    assert (board.left_s, board.datasets[0].left_s) == (None, None)


def test_max_samples_closes_a_dataset_and_raising_it_opens_it_again(stage: Make) -> None:
    s = stage({"B1": 5}, settings=make_settings(B1=DatasetSettings(max_samples=2)))
    orders = s.step()
    assert [o.id for o in orders] == [p.id for p in make_prompts("B1", 2)]
    s.work(orders)
    s.work(s.step())
    assert s.step() == []
    assert read_view(s.client).closed == {"B1"}
    assert read_carried(s.client).finished
    write_settings(s.store.path, make_settings(B1=DatasetSettings(max_samples=3)))
    (more,) = s.step()
    assert more.id == make_prompts("B1", 3)[2].id
    assert read_view(s.client).closed == frozenset()
    assert not read_carried(s.client).finished


def test_caps_that_are_raised_in_mid_run_only_add_what_is_new(stage: Make) -> None:
    s = stage({"B1": 5}, settings=make_settings(B1=DatasetSettings(max_samples=2)))
    first = s.step()
    write_settings(s.store.path, make_settings(B1=DatasetSettings(max_samples=4)))
    more = s.step()
    assert [o.id for o in [*first, *more]] == [p.id for p in make_prompts("B1", 4)]
    s.work(first + more)
    s.work(s.step())
    s.step()
    assert read_board(s.client).datasets[0].stored == 4
    assert read_carried(s.client).finished


def test_max_tokens_closes_a_dataset_whose_captures_go_on(stage: Make) -> None:
    # 5 + 3 tokens a sample: two of them reach 16.
    s = stage({"B1": 5}, settings=make_settings(B1=DatasetSettings(max_tokens=16)))
    orders = s.step()
    assert len(orders) == 5
    s.work(orders[:2])
    captures = s.step()
    assert kinds(captures) == ["Capture"] * 2
    assert read_view(s.client).closed == {"B1"}
    assert s.client.hlen(WINDOW) == 2, "orders of a closed dataset are acknowledged unrun"
    s.work(captures)
    s.step()
    assert read_carried(s.client).finished


def test_a_run_is_not_finished_while_its_prompts_are_still_being_read(stage: Make) -> None:
    s = stage({"B1": 1}, complete=False, states=StatesMode.OFF)
    s.work(s.step())
    s.step()
    assert not read_carried(s.client).finished
    s.store.add_prompts("B1", [], next_row=1, complete=True, dropped={})
    s.step()
    assert read_carried(s.client).finished


def test_settings_reach_redis_with_the_next_step(stage: Make) -> None:
    s = stage({"B1": 1})
    s.step()
    changed = make_settings(B1=DatasetSettings(max_samples=9))
    write_settings(s.store.path, changed)
    s.step()
    assert read_view(s.client).settings == changed


def test_a_new_holder_takes_over_the_window(stage: Make) -> None:
    s = stage({"B1": 3})
    s.step()
    s.feeder = s.new_feeder()
    assert s.step() == []


def test_a_redis_that_lost_its_data_gets_the_run_and_its_orders_back(stage: Make) -> None:
    s = stage({"B1": 3})
    first = s.step()
    s.client.flushall()
    with pytest.raises(RoleLostError):
        s.step()
    s.role.release()
    s.role = Role(s.client, "test")
    assert s.role.take()
    s.feeder = s.new_feeder()
    assert sorted(o.id for o in s.step()) == sorted(o.id for o in first)
    assert read_carried(s.client).run == s.store.run
    assert read_view(s.client).run == s.store.run


def test_who_lost_the_role_publishes_nothing(stage: Make) -> None:
    s = stage({"B1": 3})
    s.client.set(FEEDER, "another")
    with pytest.raises(RoleLostError):
        s.feeder.step()
    assert s.queue == []


def test_what_the_sink_lets_go_is_published_again(stage: Make) -> None:
    s = stage({"B1": 2})
    orders = s.step()
    s.client.hdel(WINDOW, window_field(orders[0].id, Stage.GENERATE))
    assert [o.id for o in s.step()] == [orders[0].id]


def test_orders_that_are_in_no_queue_on_two_looks_are_published_again(stage: Make) -> None:
    s = stage({"B1": 2})
    orders = s.step()
    s.client.lpush("short", "a message")
    assert s.step(APART_S * 3) == []
    s.client.delete("short")
    s.client.hset(UNACKED, "tag", "a message")
    assert s.step(APART_S * 3) == []
    s.client.delete(UNACKED)
    assert s.step(APART_S) == []
    again = s.step(APART_S)
    assert {o.id for o in again} == {o.id for o in orders}
    assert s.feeder.done.republished == 2


def test_lost_orders_of_one_lane_do_not_wait_for_another_without_workers(stage: Make) -> None:
    s = stage({"B1": 1})
    s.work(s.step())
    assert kinds(s.step()) == ["Capture"]
    s.client.lpush("capture", "the order")
    add_dataset(s.store, "B2", make_prompts("B2", 1))
    write_settings(s.store.path, make_settings(B1=DatasetSettings(), B2=DatasetSettings()))
    assert kinds(s.step()) == ["Generate"]
    s.step(APART_S)
    assert kinds(s.step(APART_S)) == ["Generate"]


def test_results_for_a_node_that_is_gone_are_dropped_and_made_again(stage: Make, redis_url: str) -> None:
    from workers.broker.publish import publish_many
    from workers.celery import create_app
    from workers.config import load_config

    s = stage({"B1": 1})
    s.work(s.step())
    (capture,) = s.step()
    result = answer_order(s.store, s.spool, capture)
    app = create_app(load_config({"EYAS_REDIS_URL": redis_url}))
    publish_many(app, [result])
    app.close()
    assert s.client.llen(f"{SINK}.node1") == 1
    s.step(GONE_S - 2)
    here = ProcessSnapshot(name="capture@h", lane="capture", node="node1", pid=1, at=0, started=0)
    write_process(s.client, here)
    s.step(10)
    assert s.client.llen(f"{SINK}.node1") == 1, "a node that says something is not gone"
    s.client.delete("eyas:process:capture@h")
    s.step()
    s.step(GONE_S)
    assert s.client.exists(f"{SINK}.node1") == 0
    assert [type(o) for o in s.step()] in ([Capture], [])
    assert isinstance(s.queue[-1], Capture)
    assert s.queue[-1].id == capture.id


def test_orders_of_another_store_leave_the_window(stage: Make) -> None:
    s = stage({"B1": 1})
    s.client.hset(WINDOW, b"x" * 17, "B1")
    s.step()
    assert s.client.hkeys(WINDOW) == [window_field(make_prompts("B1", 1)[0].id, Stage.GENERATE)]


def test_the_board_tells_speed_and_time_left_once_they_can_be_known(stage: Make) -> None:
    s = stage({"B1": 40}, states=StatesMode.OFF)
    orders = s.step()
    board = read_board(s.client)
    assert board.rates is None
    assert board.left_s is None
    s.work(orders[:20])
    s.step(10)
    board = read_board(s.client)
    assert board.rates.samples_per_s == pytest.approx(2.0)
    assert board.rates.generated_tokens_per_s == pytest.approx(6.0)
    assert board.left_s == pytest.approx(10.0)
    assert board.datasets[0].tokens == 20 * 8
    assert json.loads(json.dumps(board.to_json()))["window"] == 20


def test_the_board_says_what_a_person_should_know(stage: Make) -> None:
    s = stage({"B1": 1})
    write_process(
        s.client,
        ProcessSnapshot(
            name="sink@h", lane="sink", node="n", pid=1, at=0, started=0, state="paused", says="disk is full"
        ),
    )
    for name in ("long@h", "short@h"):
        write_process(
            s.client,
            ProcessSnapshot(
                name=name,
                lane="long",
                node="n",
                pid=1,
                at=0,
                started=0,
                state="waiting",
                says="no server is up",
            ),
        )
    s.step()
    assert read_board(s.client).notes == ()
    s.step(SETTLED_S)
    assert "long@h, short@h are waiting: no server is up" in read_board(s.client).notes
    notes = " | ".join(read_board(s.client).notes)
    assert "sink@h is paused: disk is full" in notes
    assert "no worker serves the lane short" in notes
