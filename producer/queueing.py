"""The run into Redis: claimed, its view published, its first window out, and who listens.

Redis and Celery themselves are known in `workers/`; these are the steps of `enqueue` that ask them.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from producer.datasets.lanes import DatasetLane
from producer.talk import say
from producer.words import count
from storage.run import StatesMode
from storage.settings import RunSettings
from workers.board.processes import anyone_listening
from workers.broker.connection import explaining, ping_or_explain
from workers.config import Config
from workers.feeder.wake import wake_feeder
from workers.runs import RunView, check_free, claim, publish_view

if TYPE_CHECKING:
    from storage.store import Store
    from workers.sglang.facts import ServerFacts

STOP_S = 5.0
"""A feeder that stops finishes the orders it has in hand; a process that ends waits no longer."""


class Queue:
    """A Redis that answers, for one run."""

    def __init__(self, config: Config, redis_url: str) -> None:
        """Raises `UnavailableError` when no Redis answers there."""
        self._redis = ping_or_explain(redis_url)
        self.url = redis_url
        self._config = replace(config, redis_url=redis_url)
        os.environ["EYAS_REDIS_URL"] = redis_url  # where this process's Celery looks

    def check_free(self, output: Path) -> None:
        """Raises `UnsuitableError` when this Redis carries another run that is not finished."""
        with explaining(self.url):
            check_free(self._redis, output)

    def claim(self, store: "Store", settings: RunSettings) -> None:
        """Make this Redis carry the run and let every process see what is wanted.

        Raises `UnsuitableError` when it carries another that is not finished.
        """
        view = RunView(run=store.run, settings=settings, output_dir=str(store.path))
        with explaining(self.url):
            claim(self._redis, store.run, store.path)
            publish_view(self._redis, view)

    def agree(self, store: "Store", servers: "Mapping[str, ServerFacts]") -> None:
        """Go on with these servers as they are now, naming those that have changed."""
        from workers.lane.first_facts import agree, first_of
        from workers.sglang.unchanged import changes

        with explaining(self.url):
            for url, facts in servers.items():
                first = first_of(self._redis, store.run.id, url)
                if first is not None and (changed := changes(first, facts)):
                    say(f"warning: {url} changed ({changed}); from now on the run uses it as it is")
            agree(self._redis, store.run.id, servers)

    def feed(self, store: "Store", settings: RunSettings) -> int:
        """Put the first window out, unless a sink feeds already, and say what is left to do.

        Returns how many samples that are.
        """
        from workers.feeder.feeding import feed_first_window

        window = feed_first_window(self._config, store)
        total, done, failed, left = _counts(store, settings)
        stored = f"{count(done)} of {count(total)} samples are in the store"
        stored += f", {count(failed)} are dead letters" if failed else ""
        if not left:
            say(f"nothing is left to do: {stored}")
        elif window.holder is not None:
            say(f"{stored}, {count(left)} to go; {window.holder} feeds the lanes")
        else:
            say(f"{stored}, {count(left)} to go; {count(window.waiting)} calls are out")
        return left

    @contextmanager
    def feeding(self, store: "Store") -> Iterator[None]:
        """Feed for as long as the block runs, in a thread, whenever no sink does.

        While prompts are read the first of them are out already; while somebody watches, a run
        without a sink still moves.
        """
        from workers.feeder.feeding import keep_feeding

        stopping = threading.Event()
        thread = threading.Thread(target=keep_feeding, args=(self._config, store, stopping), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            self.wake()
            thread.join(timeout=STOP_S)

    def wake(self) -> None:
        """Let whoever feeds look at the store now."""
        wake_feeder(self._redis)

    def say_who_listens(self, lanes: Iterable[DatasetLane], settings: RunSettings) -> None:
        """One line for each kind of process that the run needs and nobody runs."""
        needed: set[str] = set()
        for lane in lanes:
            needed |= {"short", "long"} if lane is DatasetLane.AUTO else {lane.value}
        if settings.states is StatesMode.REPLAY:
            needed.add(DatasetLane.CAPTURE.value)
        elif settings.states is StatesMode.OFF:
            needed.discard(DatasetLane.CAPTURE.value)
        listening = anyone_listening(self._redis)
        missing = sorted(needed - listening.lanes)
        if missing:
            say(f"nobody listens on {', '.join(missing)}: start workers with `producer up`")
        if not listening.sink_nodes:
            say("no sink is up, so nothing will be stored: start one with `producer up`")


def _counts(store: "Store", settings: RunSettings) -> tuple[int, int, int, int]:
    """Samples wanted, stored, dead, and to go."""
    from storage.index import Index, wanted

    capture = settings.capture if settings.states is not StatesMode.OFF else None
    index = Index(store, capture.name if capture else None, settings.retries)
    index.refresh()
    plans = [
        wanted(index.dataset(name), caps, settings.states)
        for name, caps in settings.datasets.items()
        if name in index.datasets
    ]
    return (
        sum(plan.total for plan in plans),
        sum(plan.done for plan in plans),
        sum(plan.failed for plan in plans),
        sum(len(plan.missing) for plan in plans),
    )
