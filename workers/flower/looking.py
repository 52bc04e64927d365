"""Asks Redis for the pages, off Flower's event loop: at most one look at a time, shared by all who wait.

A Redis that does not answer is an answer. What is made of a look is in `snapshot.py`, `series.py`
and `metrics.py`.
"""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from redis import Redis, RedisError

from workers.board.board import read_board
from workers.board.history import ends_of_history, read_history
from workers.board.processes import read_processes
from workers.board.tally import read_tally
from workers.broker.backlog import read_backlog
from workers.broker.connection import connect
from workers.broker.keys import FACTS
from workers.flower.metrics import metrics
from workers.flower.series import SMOOTH_S, series
from workers.flower.snapshot import Look, snapshot
from workers.runs import read_carried

T = TypeVar("T")

FRESH_S = 0.5
"""A look younger than this serves the next who asks."""
PAST_FRESH_S = 2.0
PATIENCE_S = 4.0
"""A Redis that takes longer is said not to answer."""


@dataclass(slots=True)
class _Kept:
    at: float
    task: "asyncio.Future[Any]"


class Looker:
    """One Redis, looked at for the pages of one Flower. All but `__init__` runs on its event loop."""

    def __init__(self, redis_url: str) -> None:
        self._redis = connect(redis_url)
        # Its own threads: Flower's wait for workers that do not answer.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="throughput")
        self._kept: dict[object, _Kept] = {}

    async def now(self) -> dict[str, Any]:
        """The page's figures."""
        return snapshot(await self._look_in_time(), time.time())

    async def past(self, span_s: float) -> dict[str, Any]:
        """The page's charts over the last so many seconds; 0 for the whole run."""
        return await self._shared(span_s, PAST_FRESH_S, lambda: _read_past(self._redis, span_s))

    async def metrics(self) -> bytes:
        """The text that Prometheus scrapes."""
        return metrics(await self._look_in_time(), time.time())

    async def _look_in_time(self) -> Look:
        """A look, or one at nothing when Redis takes too long: it goes on for those who ask later."""
        try:
            return await asyncio.wait_for(self._shared("now", FRESH_S, lambda: look(self._redis)), PATIENCE_S)
        except TimeoutError:
            return Look()

    def _shared(self, what: object, fresh_s: float, read: Callable[[], T]) -> "asyncio.Future[T]":
        """The result of one reading for all who ask while it runs or is fresh."""
        loop = asyncio.get_running_loop()
        kept = self._kept.get(what)
        if kept is None or (kept.task.done() and loop.time() - kept.at > fresh_s):
            # Spans are few unless somebody makes them up.
            if len(self._kept) > 32:
                self._kept.clear()
            kept = self._kept[what] = _Kept(at=loop.time(), task=loop.run_in_executor(self._threads, read))
            kept.task.add_done_callback(lambda _: setattr(kept, "at", loop.time()))
        return asyncio.shield(kept.task)


def look(redis: Redis) -> Look:
    """All that Redis says of its run now."""
    try:
        carried = read_carried(redis)
        board = read_board(redis)
        if carried is None or (board is not None and board.run_id != carried.run.id):
            board = None
        told: Any = redis.hgetall(FACTS)
        facts = {key.decode(): _json(text) for key, text in told.items()}
        return Look(
            answers=True,
            carried=carried,
            board=board,
            processes=read_processes(redis),
            tally=read_tally(redis, carried.run.id) if carried else None,
            backlog=read_backlog(redis),
            facts=facts,
        )
    except (RedisError, OSError, ValueError):
        return Look()


def _read_past(redis: Redis, span_s: float) -> dict[str, Any]:
    try:
        carried = read_carried(redis)
        run = carried.run.id if carried else ""
        ends = ends_of_history(redis, run)
        if ends is None:
            return series((), 0.0, 0.0)
        first, last = ends
        seconds, micros = redis.time()
        # A run that is over is shown as it was, without the time since.
        now = last.at if last.finished else seconds + micros / 1e6
        since = max(first.at, now - span_s) if span_s else first.at
        return series(read_history(redis, run, since - SMOOTH_S, now), since, now)
    except (RedisError, OSError, ValueError):
        return series((), 0.0, 0.0) | {"answers": False}


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
