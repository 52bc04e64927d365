"""One look at a made-up run, as Redis would give it: two lanes at two servers, one of them away."""

import dataclasses
from typing import Any

from storage.checks import ChecksSummary, RaisedAlarm
from storage.run import Run
from tests.workers.sink.making import make_spec
from workers.board.board import Board, DatasetBoard, LaneBoard, Rates, ServerBoard
from workers.board.processes import ProcessSnapshot, ServerLoad, ServerSnapshot, ServerState
from workers.board.tally import Tally, add_up
from workers.broker.backlog import Backlog
from workers.flower.snapshot import Look
from workers.runs import Carried

NOW = 1_800_000_000.0
RUN = "0888ab49" + 24 * "0"
ONE, TWO = "http://gpu1:30000", "http://gpu2:30000"


def lane_process(name: str, lane: str, flying: dict[str, int], **fields: Any) -> ProcessSnapshot:
    """A lane's process at `ONE`, which is up and says its load, and `TWO`, which is away."""
    servers = tuple(
        ServerSnapshot(
            url=url,
            state=ServerState.UP if url == ONE else ServerState.AWAY,
            since=NOW - 60,
            reason="" if url == ONE else "refused",
            in_flight=count,
            facts_id="f1" if url == ONE else "",
            load=ServerLoad(running=31, queued=2, kv_used=0.875) if url == ONE else None,
        )
        for url, count in flying.items()
    )
    given = {"node": "n1", "pid": 1, "at": NOW, "started": NOW - 600, "in_flight": sum(flying.values())}
    return ProcessSnapshot(name=name, lane=lane, servers=servers, **given | fields)


PROCESSES = (
    lane_process("short@a", "short", {ONE: 20, TWO: 0}, done=70, failed=2, tokens=7000, prompt_tokens=2100),
    lane_process("short@b", "short", {ONE: 10, TWO: 0}, done=30, again=4, tokens=3000, prompt_tokens=900),
    lane_process("capture@a", "capture", {ONE: 3}, done=80, tokens=10_400),
    ProcessSnapshot(
        name="sink@n1",
        lane="sink",
        node="n1",
        pid=2,
        at=NOW,
        started=NOW - 600,
        in_flight=5,
        written_bytes=1 << 20,
        wasted=3,
        spool_bytes=4096,
        spool_max_bytes=64_000_000_000,
        spool_oldest=NOW - 12,
        disk_free_bytes=500,
    ),
)

DATASET = DatasetBoard(
    name="B2",
    wanted=200,
    reading=False,
    generated=100,
    stored=78,
    failed=2,
    truncated=8,
    tokens=13_000,
    prompt_tokens=6000,
    queued=20,
    max_samples=200,
    max_tokens=None,
    closed=False,
    finished=False,
    left_s=90.0,
    dead_letters={"server.refused": 2},
)

BOARD = Board(
    run_id=RUN,
    model="org/tiny",
    output_dir="/data/run1",
    at=NOW - 1,
    started=NOW - 600,
    holder="sink@n1",
    states="replay",
    finished=False,
    datasets=(DATASET,),
    lanes=(
        LaneBoard(name="short", limit_per_server=40, limit=40, in_flight=30, waiting=7, processes=2),
        LaneBoard(name="capture", limit_per_server=8, limit=8, in_flight=3, waiting=0, processes=1),
    ),
    servers=(
        ServerBoard(
            url=ONE, lanes=("capture", "short"), state=ServerState.UP, since=NOW - 60, reason="", in_flight=33
        ),
        ServerBoard(
            url=TWO, lanes=("short",), state=ServerState.AWAY, since=NOW - 60, reason="refused", in_flight=0
        ),
    ),
    sinks=(),
    rates=Rates(over_s=60, generated_tokens_per_s=812.5, stored_tokens_per_s=900, samples_per_s=9.75),
    left_s=90.0,
    window=20,
    unacked=38,
    sink_waiting=6,
    wasted=3,
    republished=1,
    spool_bytes=4096,
    disk_free_bytes=500,
    stored_bytes=123_456,
    checks=ChecksSummary(
        samples=12,
        compared=12,
        alarmed=1,
        alarms=(
            RaisedAlarm(
                id="ab" * 16,
                server=ONE,
                code="states.differ",
                value=0.5,
                limit=0.1,
                message="its rows differ",
            ),
        ),
    ),
    notes=(f"server {TWO} is away: refused",),
)

CARRIED = Carried(run=Run(id=RUN, spec=make_spec()), output_dir="/data/run1", finished=False)

LOOK = Look(
    answers=True,
    carried=CARRIED,
    board=BOARD,
    processes=PROCESSES,
    tally=add_up(Tally(run=RUN), PROCESSES, NOW),
    backlog=Backlog(waiting={"short": 9, "long": 0, "capture": 0, "sink": 1}, nodes={"n1": 4}, unacked=38),
    facts={
        "f1": {
            "model": "/models/tiny",
            "sglang": "0.5.23",
            "dtype": "bfloat16",
            "quantization": None,
            "kv_cache_dtype": "auto",
            "plugin": {"kv_dtype": "bfloat16"},
            "max_total_tokens": 159_000,
            "states": "plugin",
            "tp_size": 8,
            "dp_size": 1,
        }
    },
)


def changed(**fields: Any) -> Look:
    """The look with some of it otherwise."""
    return dataclasses.replace(LOOK, **fields)
