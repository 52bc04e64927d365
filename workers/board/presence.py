"""What Redis says of a run and of the processes that serve it, for programs that only look.

`up`, its supervisor, `status` and `watch` come here. A Redis that does not answer is an answer, never an
exception of its client's.
"""

from dataclasses import dataclass

import redis

from workers.board.board import Board, read_board
from workers.board.processes import ProcessSnapshot, read_processes
from workers.broker.connection import connect
from workers.runs import Carried, read_carried

UNREACHABLE = (redis.RedisError, OSError, ValueError)
"""All that a client raises for a Redis that is not there, still loads, or has another password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """One look into Redis."""

    carried: Carried | None
    """The run this Redis carries."""
    board: Board | None
    """The feeder's last word on it; None before its first."""
    processes: tuple[ProcessSnapshot, ...]
    """What the live processes say of themselves."""


def glance(url: str) -> Glance | None:
    """What this Redis holds now; None when it does not answer."""
    try:
        with connect(url) as client:
            carried, board = read_carried(client), read_board(client)
            if board is not None and (carried is None or board.run_id != carried.run.id):
                board = None
            return Glance(carried=carried, board=board, processes=read_processes(client))
    except UNREACHABLE:
        return None


def answers(url: str) -> bool:
    """Whether this Redis takes commands from us; False while it still loads its file."""
    try:
        with connect(url) as client:
            return bool(client.ping())
    except UNREACHABLE:
        return False


def living(url: str) -> tuple[ProcessSnapshot, ...]:
    """What the live processes say of themselves; empty when Redis does not answer."""
    found = glance(url)
    return found.processes if found else ()
