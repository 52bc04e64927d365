"""What a person should know: servers that take no calls and who waits for them, clocks apart."""

import logging
import time
from collections.abc import Mapping

import pytest

from workers.board.board import ServerBoard
from workers.board.notes import REMIND_S, Reminder, clock_notes, notes_of
from workers.board.processes import ProcessSnapshot, ServerState
from workers.broker.backlog import Backlog
from workers.broker.queues import SINK, Lane


def server(url: str, state: ServerState, *lanes: str, for_s: float = 125.0) -> ServerBoard:
    return ServerBoard(
        url=url, lanes=lanes, state=state, since=time.time() - for_s, reason="connection refused", in_flight=0
    )


def backlog(**waiting: int) -> Backlog:
    queues: Mapping[str, int] = dict.fromkeys((*Lane, SINK), 0) | waiting
    return Backlog(waiting=queues, nodes={}, unacked=0)


def process(node: str, at: float) -> ProcessSnapshot:
    return ProcessSnapshot(name=f"short@{node}", lane="short", node=node, pid=1, at=at, started=at)


def test_a_server_that_is_away_is_said_with_since_when_and_how_many_wait() -> None:
    servers = [
        server("http://a:1", ServerState.AWAY, "long"),
        server("http://b:1", ServerState.UP, "short"),
        server("http://c:1", ServerState.SUSPECT, "short", for_s=20.0),
    ]
    assert notes_of(servers, [], backlog(long=431, short=7), {}) == (
        "long: server http://a:1 away for 2 min, 431 wait: connection refused",
        "short: server http://c:1 suspect for 20 s: connection refused",
    )


def test_the_log_is_reminded_of_it_once_a_minute_and_anew_when_it_goes_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    reminder = Reminder()
    away, up = server("http://a:1", ServerState.AWAY, "long"), server("http://a:1", ServerState.UP, "long")
    for now in (0.0, 1.0, REMIND_S - 1, REMIND_S + 1):
        reminder.look([away], backlog(long=431), now)
    assert [record.getMessage() for record in caplog.records] == [
        "server.away url=http://a:1 lanes=long for_s=125 waiting=431"
    ] * 2
    reminder.look([up], backlog(), REMIND_S + 2)
    reminder.look([away], backlog(), REMIND_S + 3)
    assert len(caplog.records) == 3


def test_orders_that_run_apart_are_said() -> None:
    (note,) = notes_of([], [], backlog(), {}, suspects=3)
    assert note.startswith("3 orders were in flight at two deaths of a server")


def test_a_node_whose_clock_is_not_redis_own_is_named() -> None:
    processes = [process("fine", 1000.0), process("ahead", 1060.0), process("behind", 700.0)]
    ahead, behind = clock_notes(processes, 1002.0)
    assert "clock of node ahead is off by 58 s" in ahead
    assert "clock of node behind is off by 5 min" in behind
