"""The feeder: compares the store with what is out, and publishes what is missing.

One step at a time, each short; between two steps it may die anywhere, and the next holder of the
role goes on from the store and the window. Who holds the role and when is in `feeding.py`.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from redis import Redis

from storage.check_log import CheckLog
from storage.index import DatasetIndex, Index
from storage.retries import last_number
from storage.run import StatesMode
from storage.sample import Stage
from storage.settings import RunSettings, read_settings
from storage.store import Store
from storage.wanted import Wanted, read_enough, wanted
from workers.board.processes import read_processes
from workers.board.reporting import Reporter
from workers.board.scoreboard import progress_of
from workers.broker.backlog import read_backlog
from workers.broker.messages import Message
from workers.broker.queues import Lane
from workers.feeder.choosing import Room, by_dataset, choose
from workers.feeder.feed import Feed
from workers.feeder.given import GivenRows
from workers.feeder.orders import lanes_of, order_capture, order_generate
from workers.feeder.reconcile import GoneNodes, Quiet
from workers.feeder.role import Role
from workers.feeder.window import BITS, Window
from workers.runs import Carried, RunView, claim_if_absent, finish, publish_view, read_carried, read_view

logger = logging.getLogger(__name__)

AT_ONCE = 250
"""Orders read from the store and published in one go."""
PUBLISH_S = 0.5
"""A step publishes for so long at most: settings that change reach the lanes within a second."""


@dataclass(slots=True)
class Done:
    """What one feeder has done."""

    published: int = 0
    republished: int = 0
    """Orders that were lost and let go, to be published again."""


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
        self._checks = CheckLog()
        self._window = Window(redis)
        self._feeds: dict[str, Feed] = {}
        self._counted: object = None
        self._given = GivenRows()
        self._quiet, self._gone = Quiet(), GoneNodes(redis)
        self._reporter = Reporter(redis, store, role.holder, clock)

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
        self._reporter.report(
            settings=settings,
            output_dir=carried.output_dir,
            feeds=self._feeds,
            window=self._window,
            finished=self.finished,
            republished=self.done.republished,
            checks=self._checks.follow(self._index.states if self._index else None),
        )

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
        index, retries = self._index, settings.retries
        if index is None or (index.capture, index.retries) != (capture, retries):
            self._index = index = Index(self._store, capture, retries)
            self._counted = None
        grown = index.refresh()
        if grown or self._counted is not settings:
            self._count(index, settings)
            self._counted = settings
        else:
            for feed in self._feeds.values():
                feed.reading = feed.reading and self._is_reading(feed.dataset, settings, feed.progress.plan)
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
                reading=self._is_reading(dataset, settings, plan),
            )
        self._feeds = feeds

    def _is_reading(self, dataset: DatasetIndex, settings: RunSettings, plan: Wanted) -> bool:
        """Whether `enqueue` has not read as far as is wanted."""
        state = self._store.reading_state(dataset.name)
        # The state may be newer than the index: the last prompts may not be counted yet.
        complete = state.complete and state.count == len(dataset)
        return not read_enough(dataset, settings.datasets[dataset.name], plan, complete=complete)

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
        for name, feed in self._feeds.items():
            for stage in Stage:
                positions = feed.settled(stage, self._window.out(name)).tolist()
                if positions:
                    self._window.remove(feed.dataset, positions, stage)

    def _publish_missing(self, settings: RunSettings) -> None:
        """Captures first: they finish what is begun."""
        deadline = self._clock() + PUBLISH_S
        for lane in (Lane.CAPTURE, Lane.LONG, Lane.SHORT):
            chosen = self._choose(lane)
            for first in range(0, len(chosen), AT_ONCE):
                if self._clock() >= deadline:
                    self.more = True
                    return
                self._publish_orders(chosen[first : first + AT_ONCE], _stage_of(lane), settings)
                self._quiet.forget(lane)
        self._publish_given(settings)

    def _choose(self, lane: Lane) -> list[tuple[str, int]]:
        candidates: dict[str, NDArray[np.int64]] = {}
        sizes: dict[str, NDArray[np.int64]] = {}
        room = self._room
        for name, feed in self._feeds.items():
            out, size = self._window.out(name), feed.sizes(lane)
            is_out = feed.out(lane, out)
            room = room.less(len(is_out), int(size[is_out].sum()))
            candidates[name] = feed.candidates(lane, out)[: self._room.messages]
            sizes[name] = size[candidates[name]]
        return choose(candidates, sizes, room)

    def _publish_given(self, settings: RunSettings) -> None:
        """Let a sink commit rows that came with their tokens, when `enqueue` did not."""
        for name, feed in self._feeds.items():
            given = feed.given().tolist()
            waiting = read_backlog(self._redis).results if given else 0
            due = self._given.due(name, given, now=self._clock(), waiting=waiting, most=AT_ONCE)
            if due:
                self._publish([order for _, order in self._orders(name, due, Stage.GENERATE, settings)])
                self.more = True

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
                retry = last_number(settings.retries)
                yield at, order_capture(run.id, settings.capture.name, response, retry)
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
            for name, feed in self._feeds.items():
                positions = feed.out(lane, self._window.out(name)).tolist()
                if positions:
                    logger.warning("feeder.lost lane=%s dataset=%s orders=%d", lane, name, len(positions))
                    self._window.remove(feed.dataset, positions, _stage_of(lane))
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


def _stage_of(lane: Lane) -> Stage:
    return Stage.CAPTURE if lane is Lane.CAPTURE else Stage.GENERATE
