"""What a feeder writes beside the board: the tally, the history, and what it counts in the store for people.

A step of the feeder calls it once a second; it does no more than a fraction of one's work. What
cannot be counted now, because the disk has trouble, is said at a later look.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from redis import Redis

from storage.dead_letters import DeadLetters
from storage.errors import EyasError
from storage.settings import RunSettings
from storage.store import Store
from storage.stored_bytes import StoredBytes
from workers.board.board import Board
from workers.board.history import FINEST_S, History, LaneSample, Sample, ServerSample
from workers.board.processes import ProcessSnapshot
from workers.board.rates import RateMeter
from workers.board.scoreboard import Progress, tokens_left, totals_of
from workers.board.tally import Tally, add_up, read_tally, write_tally
from workers.feeder.feed import Feed

logger = logging.getLogger(__name__)


class Chronicle:
    """One feeder's record of its run."""

    def __init__(self, redis: Redis, store: Store) -> None:
        self._redis, self._run = redis, store.run.id
        self._history = History(redis, store.run.id)
        self._size, self._dead = StoredBytes(store.path), DeadLetters(store)
        self._meters: dict[str, RateMeter] = {}
        self._tally: Tally | None = None
        self._counted: dict[str, tuple[int, Mapping[str, int]]] = {}
        self._stored_bytes: int | None = None
        self._sized_at = self._noted_at = float("-inf")

    def left_s(self, name: str, progress: Progress, settings: RunSettings, now: float) -> float | None:
        """Time left of one dataset at its own speed, seconds; None before it can be known."""
        meter = self._meters.setdefault(name, RateMeter())
        one = {name: progress}
        meter.add(now, totals_of(one))
        left = tokens_left(one, settings)
        return None if left is None else meter.left_s(left)

    def dead_letters(self, name: str, feed: Feed, first: int | None) -> Mapping[str, int]:
        """Code → the dataset's dead letters; read again when their number changes."""
        failed = feed.progress.plan.failed
        if self._counted.get(name, (0, {}))[0] != failed:
            try:
                self._counted[name] = failed, self._dead.by_code(feed.dataset, first)
            except (EyasError, OSError) as error:
                logger.debug("chronicle.dead_letters dataset=%s error=%r", name, error)
        return self._counted.get(name, (0, {}))[1]

    def stored_bytes(self, now: float) -> int | None:
        """Bytes of the store, measured each few seconds; None before they were."""
        if now - self._sized_at >= FINEST_S:
            try:
                size = self._size.refresh()
            except OSError as error:
                logger.debug("chronicle.stored_bytes error=%r", error)
                return self._stored_bytes
            if size is not None:
                self._stored_bytes, self._sized_at = size, now
        return self._stored_bytes

    def tally(self, processes: Sequence[ProcessSnapshot]) -> Tally:
        """What the processes have done, added up as of now. Raises `RedisError`."""
        before = self._tally or read_tally(self._redis, self._run)
        self._tally = add_up(before, processes, time.time())
        write_tally(self._redis, self._tally)
        return self._tally

    def write(self, board: Board, tally: Tally, processes: Sequence[ProcessSnapshot], now: float) -> None:
        """Note the moment when it is time. Raises `RedisError`."""
        if board.finished or now - self._noted_at >= FINEST_S * 0.9:
            self._history.add(sample_of(board, tally, processes))
            self._noted_at = now


def sample_of(board: Board, tally: Tally, processes: Sequence[ProcessSnapshot]) -> Sample:
    """The moment as the history keeps it."""
    loads = {s.url: s.load for p in processes for s in p.servers if s.load is not None}
    return Sample(
        run=board.run_id,
        at=0.0,
        prompt_tokens=tally.prompt_tokens,
        output_tokens=tally.output_tokens,
        captured_tokens=tally.captured_tokens,
        finished=board.finished,
        samples=board.done,
        failed=sum(dataset.failed for dataset in board.datasets),
        wasted=board.wasted,
        stored_bytes=board.stored_bytes,
        spool_bytes=board.spool_bytes,
        disk_free_bytes=board.disk_free_bytes,
        lanes={
            lane.name: LaneSample(in_flight=lane.in_flight, limit=lane.limit, waiting=lane.waiting)
            for lane in board.lanes
        },
        servers={
            server.url: ServerSample(
                in_flight=server.in_flight,
                kv_used=loads[server.url].kv_used if server.url in loads else None,
                retractions=tally.retractions.get(server.url, 0),
            )
            for server in board.servers
        },
    )
