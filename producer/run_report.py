"""How far a run is: the feeder's board out of Redis, or, without it, what the store itself shows.

This file decides whom to believe and what a person should know; `status_table.py` draws it.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from producer.words import duration
from storage.errors import UnavailableError
from storage.run import DEFAULT_OUTPUT_DIR
from workers.board.board import Board
from workers.board.presence import Glance, glance
from workers.broker.connection import without_password
from workers.broker.queues import SINK

STALE_S = 15.0
"""The feeder writes every second; a board older than this has nobody behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One look at a run."""

    board: Board
    source: Literal["redis", "store"]
    """Whose figures these are."""
    redis_answers: bool
    notes: tuple[str, ...]
    """What a person should know now, a sentence each."""

    @property
    def failed(self) -> int:
        """Dead letters of all datasets."""
        return sum(dataset.failed for dataset in self.board.datasets)

    def to_json(self) -> dict[str, Any]:
        """As `status --json` says it."""
        about = {"source": self.source, "redis_answers": self.redis_answers, "notes": list(self.notes)}
        return self.board.to_json() | about | {"done": self.board.done, "wanted": self.board.wanted}


def look(redis_url: str, output_dir: Path | None) -> Report:
    """The run that Redis carries, or the one in `output_dir`.

    Raises `UnavailableError` (`run.missing`) when there is neither.
    """
    seen = glance(redis_url)
    carried = seen.carried if seen else None
    if carried is not None and (output_dir is None or _same_folder(output_dir, carried.output_dir)):
        assert seen is not None
        if seen.board is not None and (_age_s(seen.board) < STALE_S or not Path(carried.output_dir).is_dir()):
            return Report(
                board=seen.board,
                source="redis",
                redis_answers=True,
                notes=(*seen.board.notes, *_notes(seen, seen.board)),
            )
        board = _from_store(output_dir or Path(carried.output_dir), "Redis carries the one that was there")
        return Report(board=board, source="store", redis_answers=True, notes=tuple(_notes(seen, board)))
    where = without_password(redis_url)
    if seen is None:
        has = f"no Redis answers at `{where}`"
        note = f"Redis at {where} does not answer; these figures are the store's alone"
    elif carried is None:
        has = "Redis carries none"
        note = f"Redis at {where} carries no run; `producer enqueue` goes on with this one"
    else:
        has = f"Redis carries that of `{carried.output_dir}`"
        note = f"Redis at {where} carries the run of {carried.output_dir}, not this one"
    board = _from_store(output_dir or Path(DEFAULT_OUTPUT_DIR), has)
    return Report(board=board, source="store", redis_answers=seen is not None, notes=(note,))


def _from_store(output_dir: Path, has: str) -> Board:
    from producer.store_board import store_board

    try:
        return store_board(output_dir.absolute())
    except UnavailableError as error:
        if error.code != "run.missing":
            raise
        raise UnavailableError(
            f"there is no run in `{output_dir}`, and {has}",
            code="run.missing",
            hint="begin one with `producer enqueue`, or name its folder with `--output-dir`",
        ) from None


def _notes(seen: Glance, board: Board) -> list[str]:
    """What Redis shows to be missing."""
    notes: list[str] = []
    if board.finished:
        return notes
    if seen.board is None:
        notes.append("no figures from a feeder yet; these are the store's")
    elif _age_s(seen.board) >= STALE_S:
        notes += _unfed(seen, duration(_age_s(seen.board)))
    served = {process.lane for process in seen.processes}
    # of some the feeder has said it already
    missing = [
        lane.name
        for lane in board.lanes
        if lane.waiting
        and lane.name not in served
        and not any(f"the lane {lane.name}:" in note for note in board.notes)
    ]
    if missing:
        notes.append(f"nobody serves {', '.join(missing)}, where messages wait; `producer up` starts them")
    return notes


def _unfed(seen: Glance, ago: str) -> list[str]:
    """Why nobody renews the board: no sink lives, or those that do say what they wait for."""
    sinks = [process for process in seen.processes if process.lane == SINK]
    if not sinks:
        return [f"no sink is up: nothing was fed or stored for {ago}; `producer up` starts one"]
    return [
        f"nothing was fed for {ago}: {sink.name} is {sink.state}{': ' * bool(sink.says)}{sink.says}"
        for sink in sinks
    ]


def _age_s(board: Board) -> float:
    return time.time() - board.at


def _same_folder(one: Path, other: str) -> bool:
    try:
        return one.resolve() == Path(other).resolve()
    except OSError:
        return str(one) == other
