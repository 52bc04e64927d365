"""Records in Redis: whatever is under a key, those who look see a record or none."""

import json
from typing import Any

from hostile import (
    as_text,
    deep,
    texts,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from storage.run import CaptureSpec, Run, RunSpec, Sampling, StatesMode
from storage.settings import DatasetSettings, RunSettings
from workers.board.board import (
    Board,
    DatasetBoard,
    LaneBoard,
    Rates,
    ServerBoard,
    SinkBoard,
    read_board,
)
from workers.board.processes import ProcessSnapshot, ServerSnapshot, ServerState, read_processes
from workers.broker.keys import BOARD, RUN, SETTINGS, process_key
from workers.runs import Carried, RunView, read_carried, read_view

calm = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ID, DIGEST = bytes(range(16)), bytes(range(16, 32))


CAPTURE = CaptureSpec(name="final", hs_indices=(8,), norm="post", hidden_size=8)
SPEC = RunSpec(
    model="m",
    tokenizer_digest="a",
    template_digest="b",
    vocab_size=9,
    sampling=Sampling(),
    short_max_tokens=1,
    long_max_tokens=1,
    states=StatesMode.REPLAY,
    capture=CAPTURE,
)
VIEW = RunView(
    run=Run(id="i", spec=SPEC),
    settings=RunSettings(
        server_urls=("u",),
        capture_urls=("u",),
        concurrency={"short": 1},
        max_input_tokens=5,
        states=StatesMode.REPLAY,
        capture=CAPTURE,
        datasets={"B1": DatasetSettings()},
    ),
    output_dir="/o",
    closed=frozenset({"B1"}),
)
PROCESS = ProcessSnapshot(
    name="short@h",
    lane="short",
    node="h",
    pid=1,
    at=1.0,
    started=1.0,
    servers=(ServerSnapshot(url="u", state=ServerState.UP, since=1.0),),
)
CARRIED = Carried(run=VIEW.run, output_dir="/o", finished=False)


def written(kind: Any) -> Any:
    """JSON of a record whose fields are all filled."""
    return json.loads(as_text(kind.to_json()))


def board() -> Board:
    return Board(
        run_id="i",
        model="m",
        output_dir="/o",
        at=1.0,
        started=1.0,
        holder="h",
        states="replay",
        finished=False,
        datasets=(
            DatasetBoard(
                name="B1",
                wanted=1,
                reading=False,
                generated=1,
                stored=1,
                failed=0,
                truncated=0,
                tokens=1,
                prompt_tokens=1,
                queued=0,
                max_samples=None,
                max_tokens=5,
                closed=False,
                finished=False,
            ),
        ),
        lanes=(LaneBoard(name="short", limit_per_server=1, limit=1, in_flight=0, waiting=0, processes=1),),
        servers=(
            ServerBoard(url="u", lanes=("short",), state=ServerState.UP, since=1.0, reason="", in_flight=0),
        ),
        sinks=(
            SinkBoard(
                name="s", node="h", state="running", says="", waiting=0, spool_bytes=1, spool_max_bytes=2
            ),
        ),
        rates=Rates(over_s=1.0, generated_tokens_per_s=1.0, stored_tokens_per_s=1.0, samples_per_s=1.0),
        left_s=1.0,
        window=1,
        unacked=0,
        sink_waiting=0,
        wasted=0,
        republished=0,
        spool_bytes=0,
        disk_free_bytes=None,
        notes=("n",),
    )


def test_records_in_redis_come_back_equal() -> None:
    assert RunView.from_json(written(VIEW)) == VIEW
    assert ProcessSnapshot.from_json(written(PROCESS)) == PROCESS
    assert Board.from_json(written(board())) == board()


@settings(calm, max_examples=100)
@given(data=st.data())
def test_records_in_redis(redis_url: str, data: st.DataObject) -> None:
    from producer.status_table import draw, facts

    with Redis.from_url(redis_url) as redis:
        redis.set(BOARD, data.draw(texts(written(board()))))
        redis.set(process_key("a"), data.draw(texts(written(PROCESS))))
        redis.set(SETTINGS, data.draw(texts(written(VIEW))))
        redis.set(RUN, data.draw(texts(written(CARRIED))))
        found = read_board(redis)
        if found is not None:
            # what status shows of it
            draw(found, found.notes)
            facts(found)
        assert all(isinstance(one.pid, int) for one in read_processes(redis))
        view, carried = read_view(redis), read_carried(redis)
        assert view is None or isinstance(view.output_dir, str)
        assert carried is None or isinstance(carried.run.id, str)


def test_what_is_nested_too_deep_is_no_record(redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        for key in (BOARD, process_key("a"), SETTINGS, RUN):
            redis.set(key, deep())
        assert (read_board(redis), read_processes(redis), read_view(redis), read_carried(redis)) == (
            None,
            (),
            None,
            None,
        )
