"""The feeder: compares the store with what is out, and publishes what is missing.

One step at a time, each short; between two steps it may die anywhere, and the next holder of the
role goes on from the store and the window. Who holds the role and when is in `feeding.py`.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from redis import Redis

from storage.index import DatasetIndex, Index, Outcome, wanted
from storage.run import StatesMode
from storage.sample import Stage
from storage.settings import RunSettings, read_settings
from storage.store import Store
from workers.backlog import read_backlog
from workers.board import Board, read_board, read_processes, write_board
from workers.choosing import Room, by_dataset, choose
from workers.messages import Message
from workers.orders import MESSAGE_BYTES, TOKEN_BYTES, lanes_of, order_capture, order_generate
from workers.queues import Lane
from workers.rates import RateMeter
from workers.reconcile import GoneNodes, Quiet
from workers.role import Role
from workers.runs import Carried, RunView, claim_if_absent, finish, publish_view, read_carried, read_view
from workers.scoreboard import (
    Progress,
    Wasted,
    dataset_board,
    lane_boards,
    notes_of,
    progress_of,
    server_boards,
    sink_boards,
    tokens_left,
    totals_of,
)
from workers.window import BITS, Window

logger = logging.getLogger(__name__)

AT_ONCE = 250
"""Orders read from the store and published in one go."""
PUBLISH_S = 0.5
"""A step publishes for so long at most: settings that change reach the lanes within a second."""
BOARD_S = 1.0
GIVEN_AFTER_S = 60.0
"""Rows that came with their tokens are committed by `enqueue`; if it died, the feeder does it."""


@dataclass(slots=True)
class Feed:
    """What the feeder knows of one dataset."""

    dataset: DatasetIndex
    lane: str
    """As the manifest says it: `auto` goes by length."""
    lanes: NDArray[np.uint8]
    """Per prompt, place in `Lane` of the lane that generates."""
    progress: Progress
    reading: bool
    given_since: float | None = None
    """Since when rows that came with their tokens have no response."""


@dataclass(slots=True)
class Done:
    """What one feeder has done."""

    published: int = 0
    republished: int = 0
    started: float = field(default_factory=time.time)


class Feeder:
    """Feeds one run while it holds the role."""

    def __init__(
        self,
        *,
        store: Store,
        redis: Redis,
        publish: Callable[[Sequence[Message]], object],
        role: Role,
        room: Room | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.done = Done()
        self.more = False
        """Whether the last step stopped for time and not for want of work."""
        self.finished = False
        self._store, self._redis, self._publish, self._role = store, redis, publish, role
        self._room, self._clock = room or Room(), clock
        self._settings: tuple[tuple[int, int, int], RunSettings] | None = None
        self._index: Index | None = None
        self._window = Window(redis)
        self._feeds: dict[str, Feed] = {}
        self._counted: object = None
        self._quiet, self._gone = Quiet(), GoneNodes(redis)
        self._meter = RateMeter()
        self._wasted: Wasted | None = None
        self._board_at = float("-inf")

    def step(self) -> None:
        """Look once and do what can be done in about a second.

        Raises `RoleLostError`, `UnsuitableError` when Redis carries another run by now, and
        `RedisError` when it is away.
        """
        self._role.confirm()
        self.more = False
        carried = self._carried()
        settings = self._read_settings()
        if settings is None:
            return  # `enqueue` has made the run and not its settings yet
        grown = self._follow_store(settings)
        self._publish_view(settings, carried)
        self._forget_what_is_stored()
        self._publish_missing(settings)
        self._reconcile(grown)
        self._note_finished(settings, carried)
        if self._clock() - self._board_at >= BOARD_S:
            self._board_at = self._clock()
            self._write_board(settings, carried)

    @property
    def waiting(self) -> int:
        """Orders published and not stored yet."""
        return len(self._window)

    def _carried(self) -> Carried:
        """What Redis carries: this run, given back to it when it lost its data."""
        carried = read_carried(self._redis)
        if carried is None or carried.run.id != self._store.run.id:
            claim_if_absent(self._redis, self._store.run, self._store.path)
            carried = read_carried(self._redis)
        return carried or Carried(run=self._store.run, output_dir=str(self._store.path), finished=False)

    def _read_settings(self) -> RunSettings | None:
        path = self._store.path / "settings.json"
        try:
            status = path.stat()
            signature = (status.st_mtime_ns, status.st_ino, status.st_size)
            if self._settings is None or self._settings[0] != signature:
                self._settings = (signature, read_settings(self._store.path))
        except FileNotFoundError:
            return None
        return self._settings[1]

    def _follow_store(self, settings: RunSettings) -> bool:
        """See what was committed since, count it, and follow the window; whether anything was."""
        capture = (
            settings.capture.name if settings.capture and settings.states is not StatesMode.OFF else None
        )
        if self._index is None or self._index.capture != capture:
            self._index, self._counted = Index(self._store, capture), None
        grown = self._index.refresh()
        if grown or self._counted is not settings:
            self._count(self._index, settings)
            self._counted = settings
        else:
            for feed in self._feeds.values():
                feed.reading = feed.reading and self._is_reading(feed.dataset, settings)
        self._window.refresh({name: feed.dataset for name, feed in self._feeds.items()})
        return grown

    def _count(self, index: Index, settings: RunSettings) -> None:
        feeds: dict[str, Feed] = {}
        for name, caps in settings.datasets.items():
            spec = self._store.dataset_spec(name)
            if name not in index.datasets or spec is None:
                continue
            dataset = index.dataset(name)
            before = self._feeds.get(name)
            plan = wanted(dataset, caps, settings.states)
            feeds[name] = Feed(
                dataset=dataset,
                lane=spec.lane,
                lanes=before.lanes
                if before is not None and len(before.lanes) == len(dataset)
                else lanes_of(spec.lane, dataset.prompt_tokens),
                progress=progress_of(dataset, plan, caps.max_samples, settings.states),
                reading=self._is_reading(dataset, settings),
                given_since=before.given_since if before is not None else None,
            )
        self._feeds = feeds

    def _is_reading(self, dataset: DatasetIndex, settings: RunSettings) -> bool:
        """Whether `enqueue` has not read as far as is wanted."""
        most = settings.datasets[dataset.name].max_samples
        if most is not None and len(dataset) >= most:
            return False
        state = self._store.reading_state(dataset.name)
        # The state may be newer than the index: the last prompts may not be counted yet.
        return not state.complete or state.count != len(dataset)

    def _publish_view(self, settings: RunSettings, carried: Carried) -> None:
        view = RunView(
            run=self._store.run,
            settings=settings,
            output_dir=carried.output_dir,
            closed=frozenset(name for name, feed in self._feeds.items() if feed.progress.plan.closed),
        )
        if read_view(self._redis) != view:
            publish_view(self._redis, view)

    def _forget_what_is_stored(self) -> None:
        for feed in self._feeds.values():
            out, outcome = self._window.out(feed.dataset.name), feed.dataset.outcome
            # Orders of a closed dataset are acknowledged unrun: no result will come.
            answered = (outcome != Outcome.NONE) | feed.progress.plan.closed
            settled = (outcome == Outcome.STORED) | (outcome == Outcome.DEAD)
            for stage, over in ((Stage.GENERATE, answered), (Stage.CAPTURE, settled)):
                positions = np.flatnonzero(((out & BITS[stage]) != 0) & over)
                if len(positions):
                    self._window.remove(feed.dataset, positions.tolist(), stage)

    def _publish_missing(self, settings: RunSettings) -> None:
        """Captures first: they finish what is begun."""
        deadline = self._clock() + PUBLISH_S
        for lane in (Lane.CAPTURE, Lane.LONG, Lane.SHORT):
            chosen = self._choose(lane)
            stage = Stage.CAPTURE if lane is Lane.CAPTURE else Stage.GENERATE
            for first in range(0, len(chosen), AT_ONCE):
                if self._clock() >= deadline:
                    self.more = True
                    return
                self._publish_orders(chosen[first : first + AT_ONCE], stage, settings)
                self._quiet.forget(lane)
        self._publish_given(settings)

    def _choose(self, lane: Lane) -> list[tuple[str, int]]:
        candidates: dict[str, NDArray[np.int64]] = {}
        sizes: dict[str, NDArray[np.int64]] = {}
        room = self._room
        for name, feed in self._feeds.items():
            missing, out, size = (
                feed.progress.plan.missing,
                self._window.out(name),
                _sizes(feed.dataset, lane),
            )
            outcome = feed.dataset.outcome[missing]
            if lane is Lane.CAPTURE:
                is_out = np.flatnonzero(out & BITS[Stage.CAPTURE])
                free = (outcome == Outcome.RESPONDED) & ((out[missing] & BITS[Stage.CAPTURE]) == 0)
            else:
                mine = feed.lanes == tuple(Lane).index(lane)
                is_out = np.flatnonzero(((out & BITS[Stage.GENERATE]) != 0) & mine)
                is_free = (out[missing] & BITS[Stage.GENERATE]) == 0
                free = (outcome == Outcome.NONE) & is_free & mine[missing]
            room = room.less(len(is_out), int(size[is_out].sum()))
            candidates[name] = missing[free][: self._room.messages]
            sizes[name] = size[candidates[name]]
        return choose(candidates, sizes, room)

    def _publish_given(self, settings: RunSettings) -> None:
        """Commit rows that came with their tokens, when `enqueue` did not."""
        for name, feed in self._feeds.items():
            missing = feed.progress.plan.missing
            given = missing[feed.lanes[missing] == tuple(Lane).index(Lane.CAPTURE)]
            given = given[feed.dataset.outcome[given] == Outcome.NONE]
            if not len(given):
                feed.given_since = None
            elif feed.given_since is None:
                feed.given_since = self._clock()
            elif self._clock() - feed.given_since >= GIVEN_AFTER_S:
                self._publish_orders([(name, int(at)) for at in given[:AT_ONCE]], Stage.GENERATE, settings)

    def _publish_orders(self, chosen: Sequence[tuple[str, int]], stage: Stage, settings: RunSettings) -> None:
        """Into the window, then into the queue, unless somebody else may feed by now."""
        orders: dict[tuple[str, int], Message] = {}
        for name, positions in by_dataset(chosen).items():
            orders.update(((name, at), order) for at, order in self._orders(name, positions, stage, settings))
        self._role.check()
        for name, positions in by_dataset(chosen).items():
            is_out = self._window.out(name)[positions] & BITS[stage]
            new = [at for at, out in zip(positions, is_out.tolist(), strict=True) if not out]
            self._window.add(self._feeds[name].dataset, new, stage)
        self._publish([orders[one] for one in chosen])
        self.done.published += len(chosen)

    def _orders(
        self, name: str, positions: Sequence[int], stage: Stage, settings: RunSettings
    ) -> Iterator[tuple[int, Message]]:
        run, feed = self._store.run, self._feeds[name]
        if stage is Stage.CAPTURE:
            assert settings.capture is not None
            for at in positions:
                response = self._store.response(feed.dataset.id_rows[at].tobytes())
                yield at, order_capture(run.id, settings.capture.name, response)
            return
        wanted_now = set(positions)
        prompts = self._store.prompts(name, positions[0], positions[-1] + 1)
        for at, prompt in enumerate(prompts, positions[0]):
            if at in wanted_now:
                yield at, order_generate(run.id, run.spec, settings, feed.lane, prompt)

    def _reconcile(self, grown: bool) -> None:
        """Let go of orders that were lost: the next step publishes them again."""
        backlog = read_backlog(self._redis)
        alive = {process.node for process in read_processes(self._redis)}
        self._gone.look(self._clock(), backlog, alive)
        for lane in self._quiet.look(self._clock(), backlog, progress=grown or self.more):
            stage = Stage.CAPTURE if lane is Lane.CAPTURE else Stage.GENERATE
            for feed in self._feeds.values():
                is_out = (self._window.out(feed.dataset.name) & BITS[stage]) != 0
                if lane is not Lane.CAPTURE:
                    # What came with its tokens went straight to a sink; it is found with `short`.
                    mine = feed.lanes == tuple(Lane).index(lane)
                    given = feed.lanes == tuple(Lane).index(Lane.CAPTURE)
                    is_out &= (mine | given) if lane is Lane.SHORT else mine
                positions = np.flatnonzero(is_out).tolist()
                if positions:
                    logger.warning(
                        "feeder.lost lane=%s dataset=%s orders=%d", lane, feed.dataset.name, len(positions)
                    )
                    self._window.remove(feed.dataset, positions, stage)
                    self.done.republished += len(positions)
                    self.more = True
            self._quiet.forget(lane)

    def _note_finished(self, settings: RunSettings, carried: Carried) -> None:
        self.finished = bool(settings.datasets) and all(
            name in self._feeds and not self._feeds[name].reading and self._feeds[name].progress.plan.finished
            for name in settings.datasets
        )
        if self.finished != carried.finished:
            logger.info("run.%s", "finished" if self.finished else "unfinished")
            finish(self._redis, self._store.run.id, finished=self.finished)

    def _write_board(self, settings: RunSettings, carried: Carried) -> None:
        processes, backlog = read_processes(self._redis), read_backlog(self._redis)
        progress = {name: feed.progress for name, feed in self._feeds.items()}
        if self._wasted is None:
            old = read_board(self._redis)
            known = sum(process.wasted for process in processes)
            same = old is not None and old.run_id == self._store.run.id
            self._wasted = Wasted(max(0, old.wasted - known) if old is not None and same else 0)
        self._meter.add(self._clock(), totals_of(progress))
        left = tokens_left(progress, settings)
        servers = server_boards(settings, processes)
        free = [p.disk_free_bytes for p in processes if p.disk_free_bytes is not None]
        queued = self._queued()
        write_board(
            self._redis,
            Board(
                run_id=self._store.run.id,
                model=self._store.run.spec.model,
                output_dir=carried.output_dir,
                at=time.time(),
                started=self.done.started,
                holder=self._role.holder,
                states=settings.states,
                finished=self.finished,
                datasets=tuple(
                    dataset_board(
                        name, feed.progress, settings, reading=feed.reading, queued=sum(queued[name].values())
                    )
                    for name, feed in self._feeds.items()
                ),
                lanes=lane_boards(settings, processes, backlog),
                servers=servers,
                sinks=sink_boards(processes, backlog),
                rates=self._meter.rates(),
                left_s=0.0 if self.finished else None if left is None else self._meter.left_s(left),
                window=len(self._window),
                unacked=backlog.unacked,
                sink_waiting=backlog.results + sum(p.in_flight for p in processes if p.lane == "sink"),
                wasted=self._wasted.add(processes),
                republished=self.done.republished,
                spool_bytes=sum({p.node: p.spool_bytes or 0 for p in processes}.values()),
                disk_free_bytes=min(free, default=None),
                notes=notes_of(
                    servers,
                    processes,
                    backlog,
                    {lane: sum(q[lane] for q in queued.values()) for lane in Lane},
                ),
            ),
        )

    def _queued(self) -> Mapping[str, Mapping[Lane, int]]:
        """Dataset → lane → orders that are out."""
        found = {}
        for name, feed in self._feeds.items():
            out = self._window.out(name)
            generating = feed.lanes[(out & BITS[Stage.GENERATE]) != 0]
            found[name] = {
                lane: int(np.count_nonzero(out & BITS[Stage.CAPTURE]))
                if lane is Lane.CAPTURE
                else int(np.count_nonzero(generating == at))
                for at, lane in enumerate(Lane)
            }
        return found


def _sizes(dataset: DatasetIndex, lane: Lane) -> NDArray[np.int64]:
    """About how many bytes the order for each prompt takes in Redis."""
    tokens = dataset.sample_tokens if lane is Lane.CAPTURE else dataset.prompt_tokens
    return MESSAGE_BYTES + TOKEN_BYTES * tokens.astype(np.int64)
