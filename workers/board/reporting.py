"""Writing the board, once a second: what the feeder sees, and what the processes say of themselves.

The adding up is in `scoreboard.py`. Nothing here decides anything.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from redis import Redis

from storage.checks import ChecksSummary
from storage.settings import RunSettings
from storage.store import Store
from workers.board.board import Board, ServerBoard, write_board
from workers.board.chronicle import Chronicle
from workers.board.notes import Reminder, clock_notes, notes_of
from workers.board.processes import ProcessSnapshot, read_processes
from workers.board.rates import RateMeter
from workers.board.scoreboard import (
    dataset_board,
    lane_boards,
    server_boards,
    sink_boards,
    tokens_left,
    totals_of,
)
from workers.broker.backlog import Backlog, read_backlog
from workers.broker.queues import SINK, Lane
from workers.feeder.feed import Feed
from workers.feeder.window import Window
from workers.lane.marks import count_suspects

EVERY_S = 1.0
SETTLED_S = 3.0
"""What is wrong in a run's first seconds is mostly that not everybody has looked at it yet."""


class Reporter:
    """One feeder's view of its run over time."""

    def __init__(self, redis: Redis, store: Store, holder: str, clock: Callable[[], float]) -> None:
        self._redis, self._run, self._holder, self._clock = redis, store.run, holder, clock
        self._chronicle = Chronicle(redis, store)
        self._started = time.time()
        self._notes_from = clock() + SETTLED_S
        self._meter = RateMeter()
        self._written_at, self._was_finished = float("-inf"), False
        self._reminder = Reminder()

    def report(
        self,
        *,
        settings: RunSettings,
        output_dir: str,
        feeds: Mapping[str, Feed],
        window: Window,
        finished: bool,
        republished: int,
        checks: ChecksSummary | None,
    ) -> None:
        """Write the board, unless that was less than a second ago and it was as finished as now."""
        now = self._clock()
        if now - self._written_at < EVERY_S and finished == self._was_finished:
            return
        self._written_at, self._was_finished = now, finished
        processes, backlog = read_processes(self._redis), read_backlog(self._redis)
        tally = self._chronicle.tally(processes)
        progress = {name: feed.progress for name, feed in feeds.items()}
        self._meter.add(now, totals_of(progress))
        # While nothing can be stored, no speed of before tells when it will be.
        sinks = {p.state for p in processes if p.lane == SINK}
        stalled = bool(sinks) and "running" not in sinks
        left = None if stalled else tokens_left(progress, settings)
        servers = server_boards(settings, processes)
        out = {name: [len(feed.out(lane, window.out(name))) for lane in Lane] for name, feed in feeds.items()}
        waiting_for = {lane: sum(counts[at] for counts in out.values()) for at, lane in enumerate(Lane)}
        free = [p.disk_free_bytes for p in processes if p.disk_free_bytes is not None]
        board = Board(
            run_id=self._run.id,
            model=self._run.spec.model,
            output_dir=output_dir,
            at=time.time(),
            started=self._started,
            holder=self._holder,
            states=settings.states,
            finished=finished,
            datasets=tuple(
                dataset_board(
                    name,
                    feed.progress,
                    settings,
                    reading=feed.reading,
                    queued=sum(out[name]),
                    left_s=None if stalled else self._chronicle.left_s(name, feed.progress, settings, now),
                    dead_letters=self._chronicle.dead_letters(
                        name, feed, settings.datasets[name].max_samples
                    ),
                )
                for name, feed in feeds.items()
            ),
            lanes=lane_boards(settings, processes, backlog),
            servers=servers,
            sinks=sink_boards(processes, backlog),
            rates=self._meter.rates(),
            left_s=0.0 if finished else None if left is None else self._meter.left_s(left),
            window=len(window),
            unacked=backlog.unacked,
            sink_waiting=backlog.results + sum(p.in_flight for p in processes if p.lane == SINK),
            wasted=tally.of("wasted"),
            wasted_tokens=tally.of("wasted_tokens"),
            republished=republished,
            spool_bytes=sum({p.node: p.spool_bytes or 0 for p in processes}.values()),
            disk_free_bytes=min(free, default=None),
            stored_bytes=self._chronicle.stored_bytes(now),
            checks=checks,
            notes=self._notes(servers, processes, backlog, waiting_for) if now >= self._notes_from else (),
        )
        write_board(self._redis, board)
        self._chronicle.write(board, tally, processes, now)

    def _notes(
        self,
        servers: Sequence[ServerBoard],
        processes: Sequence[ProcessSnapshot],
        backlog: Backlog,
        waiting_for: Mapping[Lane, int],
    ) -> tuple[str, ...]:
        self._reminder.look(servers, backlog, self._clock())
        seconds, micros = self._redis.time()
        return (
            *notes_of(servers, processes, backlog, waiting_for, count_suspects(self._redis, self._run.id)),
            *clock_notes(processes, seconds + micros / 1e6),
        )
