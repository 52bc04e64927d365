"""The life of a sink process: finds its store, commits what it holds, feeds when nobody else does.

Four threads beside Celery's: one looks every second (which run, which store, what to say of
itself), one commits, one feeds, one merges small segments (`merging.py`). Celery's side is
`step.py`. No error ends a thread: it is said in the snapshot and tried again.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from redis import Redis, RedisError

from storage.errors import EyasError, RunReplacedError
from storage.retries import last_number
from storage.run import CaptureSpec
from storage.spool import Spool
from storage.store import Store
from workers.board.processes import forget_process, write_process
from workers.broker.garbage import KEPT, set_aside
from workers.broker.messages import Message
from workers.config import Config
from workers.feeder.feeding import feed_while_free
from workers.feeder.wake import wake_feeder
from workers.runs import claim_if_absent, read_carried, read_view
from workers.sink.batching import Batcher, Held
from workers.sink.commit import Sink
from workers.sink.merging import Merger
from workers.sink.status import SinkStatus
from workers.sink.sweeping import Sweeper
from workers.stopping import StoppedError

logger = logging.getLogger(__name__)

LOOK_S = 1.0


class _LeftError(StoppedError):
    """What waits is for a store that this process has left for another run's."""


class SinkProcess:
    """One sink. Made once a process; `start` and `stop` once each."""

    def __init__(
        self,
        *,
        config: Config,
        name: str,
        redis: Redis,
        publish: Callable[[Sequence[Message]], object],
        acknowledge: Callable[[Sequence[Held]], None],
        settle_s: float,
        open_store: Callable[[Path], Store] = Store.open,
    ) -> None:
        self.batcher = Batcher()
        self._config, self._name, self._redis = config, name, redis
        self._publish, self._acknowledge, self._open_store = publish, acknowledge, open_store
        self._spool = Spool(config.spool_dir, config.node, config.spool_max_bytes)
        self._store: Store | None = None
        self._sink: Sink | None = None
        self._capture: CaptureSpec | None = None
        self._retry = 0
        self._serving = False
        self._status = SinkStatus()
        self._garbage: deque[tuple[bytes, str]] = deque(maxlen=KEPT)
        self._sweeper = Sweeper(redis, self._spool, settle_s=settle_s)
        self.stopping = threading.Event()
        self._merger = Merger(config.node, self.stopping)
        self._committing: Sink | None = None
        self._threads = [
            threading.Thread(target=self._look_on, name="sink-look", daemon=True),
            threading.Thread(target=self._commit_on, name="sink-commit", daemon=True),
            threading.Thread(target=self._feed_on, name="sink-feed", daemon=True),
            threading.Thread(target=self._merger.run, args=(self._served,), name="sink-merge", daemon=True),
        ]

    def start(self) -> None:
        """Begin to look, commit and feed."""
        for thread in self._threads:
            thread.start()

    def stop(self, at_most_s: float) -> None:
        """End after the commit that is under way, if it ends in time; what is held is not committed."""
        self.stopping.set()
        deadline = time.monotonic() + at_most_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(RedisError, OSError):
            forget_process(self._redis, self._name)

    @property
    def takes_more(self) -> bool:
        """Whether results may be received now: there is a store for them, and room to hold them."""
        return self._serving and self.batcher.has_room and not self.stopping.is_set()

    @property
    def serves(self) -> bool:
        """Whether there is a store for the run that Redis carries."""
        return self._serving

    def concerns(self, run_id: str) -> bool:
        """Whether a result of this run belongs into the store that is open."""
        store = self._store
        return store is not None and store.run.id == run_id

    def set_aside(self, body: bytes, why: str) -> None:
        """Keep what is no result for this store for a person to look at, with the next look."""
        self._status.aside += 1
        self._garbage.append((body, why))

    def pause(self, seconds: float, why: str) -> None:
        """As `endurance.Host`: wait, and say why."""
        if self._committing is not self._sink:
            raise _LeftError
        self._status.become("paused", why)
        if self.stopping.wait(seconds):
            raise StoppedError

    def resume(self) -> None:
        """As `endurance.Host`: all is well again."""
        self._status.become("running")

    # The thread that looks.

    def _look_on(self) -> None:
        while not self.stopping.is_set():
            try:
                self._find_store()
                self._say()
                self._sweeper.look(self._store)
            except (RedisError, OSError, EyasError) as error:
                logger.debug("sink.look error=%r", error)
            # The edge of the thread: an error of ours must not silence the process.
            except Exception:
                logger.exception("sink.look failed")
            self.stopping.wait(LOOK_S)

    def _find_store(self) -> None:
        """Open the store of the run that Redis carries, or say why that cannot be."""
        carried = read_carried(self._redis)
        folder = self._config.output_dir or (Path(carried.output_dir) if carried else None)
        store = self._store
        if carried is None and folder is None and store is not None:
            folder = store.path  # Redis lost its data
        if folder is None:
            self._wait("there is no run yet: `producer enqueue` begins one")
            return
        try:
            # Opened again for as long as it is not the run's: another may have begun in that folder.
            if store is None or store.path != folder or (carried and carried.run.id != store.run.id):
                store = self._open(folder)
            store.check_run()
            # After Redis lost its data this is what gives it the run back.
            claim_if_absent(self._redis, store.run, folder)
        except EyasError as error:
            self._wait(error.message)
            return
        self._serve()

    def _open(self, folder: Path) -> Store:
        """The folder's store, the one that is open if it is that."""
        store = self._open_store(folder)
        if self._store is not None and (self._store.path, self._store.run) == (folder, store.run):
            return self._store
        self._serving = False
        self._store = store
        self._sink = Sink(store=store, spool=self._spool, redis=self._redis, host=self)
        logger.info("sink.store path=%s run=%s", folder, store.run.id)
        return store

    def _serve(self) -> None:
        view = read_view(self._redis)
        assert self._store is not None
        self._capture = view.settings.capture if view is not None else self._store.run.spec.capture
        self._retry = last_number(view.settings.retries) if view is not None else 0
        if not self._serving:
            self._serving = True
            self._status.become("running")

    def _wait(self, why: str) -> None:
        self._serving = False
        self._status.become("waiting", why)

    def _say(self) -> None:
        while self._garbage:
            set_aside(self._redis, *self._garbage.popleft())
        self._write_snapshot()

    def _write_snapshot(self) -> None:
        snapshot = self._status.snapshot(
            name=self._name,
            node=self._config.node,
            held=len(self.batcher),
            spool=self._spool,
            output=self._store.path if self._store is not None else None,
        )
        write_process(self._redis, snapshot)

    # The thread that commits.

    def _commit_on(self) -> None:
        while not self.stopping.is_set():
            batch = self.batcher.take(LOOK_S)
            if not batch:
                continue
            try:
                self._commit(batch)
            except (RunReplacedError, _LeftError) as error:
                # Not acknowledged: they wait here for the folder of their run, or for another run.
                if isinstance(error, RunReplacedError):
                    self._wait(error.message)
                    self.stopping.wait(LOOK_S)
                for held in batch:
                    self.batcher.add(held)
            except StoppedError:
                return
            # The edge of the thread: nothing is acknowledged, so all of it is tried again.
            except Exception as error:
                logger.exception("sink.commit failed messages=%d", len(batch))
                self._status.become("paused", f"cannot commit: {error!r}")
                self.stopping.wait(10 * LOOK_S)
                for held in batch:
                    self.batcher.add(held)
            finally:
                self.batcher.done(batch)
            # Said at once, so that the feeder, woken, does not show what was held a second ago.
            with contextlib.suppress(RedisError, OSError):
                self._write_snapshot()
            wake_feeder(self._redis)

    def _commit(self, batch: Sequence[Held]) -> None:
        """Commit, then acknowledge, then free the spool: the order that loses nothing."""
        # Once: the thread that looks may open another store meanwhile.
        sink = self._sink
        assert sink is not None, "received before a store was open"
        self._committing = sink
        self._merger.committing.set()
        try:
            self._commit_to(sink, batch)
        finally:
            self._merger.committing.clear()

    def _commit_to(self, sink: Sink, batch: Sequence[Held]) -> None:
        began = time.monotonic()
        results = [held.result for held in batch if held.result.run == sink.run_id]
        tally = sink.commit(results, self._capture, self._retry)
        self._acknowledge(batch)
        sink.free(results)
        self._status.add(len(batch), tally)
        logger.info(
            "sink.committed responses=%d states=%d failures=%d duplicates=%d lost=%d mb=%.1f s=%.2f",
            tally.responses,
            tally.states,
            tally.failures,
            tally.duplicates,
            tally.lost,
            tally.state_bytes / 1e6,
            time.monotonic() - began,
        )

    # The thread that feeds.

    def _feed_on(self) -> None:
        while not self.stopping.is_set():
            store = self._store
            if store is not None and self._serving:
                feed_while_free(
                    store=store,
                    redis=self._redis,
                    publish=self._publish,
                    name=self._name,
                    stopping=self.stopping,
                    concerned=partial(self._serves_still, store),
                )
                self.stopping.wait(LOOK_S)
            else:
                self.stopping.wait(LOOK_S / 5)

    def _served(self) -> Store | None:
        return self._store if self._serving else None

    def _serves_still(self, store: Store) -> bool:
        return self._serving and self._store is store
