"""A lane process: what it works for, with which servers, how much, and what it says of itself.

Once a second a thread reads the run's view, tells the servers' watcher what is wanted, renews the
slots and writes the snapshot. Orders are run by `tasks.py`; when the next one is taken is decided
in `consuming.py` by `Lane.room`.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable

from redis import RedisError

from storage.errors import EyasError
from storage.spool import Spool
from workers.board.processes import ProcessSnapshot, forget_process, write_process
from workers.broker.celeryconfig import Timing
from workers.broker.connection import connect
from workers.broker.garbage import set_aside
from workers.broker.keys import FACTS
from workers.broker.messages import Capture, Generate, Responded, Result
from workers.broker.queues import Lane as LaneName
from workers.config import Config
from workers.lane.account import Account
from workers.lane.alone import Alone
from workers.lane.apart import Apart
from workers.lane.calls import Calls
from workers.lane.first_facts import FirstFacts
from workers.lane.flight import Flight
from workers.lane.loop import LoopThread
from workers.lane.marks import Marks
from workers.lane.pause import Pause
from workers.lane.sinks import Sinks
from workers.lane.slots import TWIN, Asked, Slots
from workers.lane.standing import BEFORE, standing
from workers.runs import RunView, read_view
from workers.sglang.attempt import Context
from workers.sglang.audit.auditor import Auditor
from workers.sglang.client import SGLangClient
from workers.sglang.decoding import DecodePool
from workers.sglang.execute import execute
from workers.sglang.facts import ServerFacts
from workers.sglang.passing import Passing
from workers.sglang.servers import ServerPool
from workers.sglang.spool_probe import probe_spool
from workers.sglang.suitability import Needs, needs_of

logger = logging.getLogger(__name__)


class Lane:
    """One lane process. Made once a process; `start` and `close` once each."""

    def __init__(self, lane: LaneName, *, name: str, capacity: int, config: Config, timing: Timing) -> None:
        self.lane, self.name, self.config, self.timing = lane, name, config, timing
        self.flight = Flight()
        self.pause = Pause()
        self._account = Account(lane, name, config.node)
        self.view: RunView | None = None
        self.stopping = threading.Event()
        """Set when calls are cancelled: from then on nothing waits for Redis either."""
        self.loop = LoopThread("calls")
        self.calls = Calls(capacity, self._healthy)
        self._draining = False
        self._redis = connect(config.redis_url)
        self._slots = Slots(
            self._redis,
            lane,
            name,
            token=secrets.token_hex(4),
            ttl_s=timing.slots_s,
            twin_s=3 * timing.pulse_s,
        )
        self._first_facts = FirstFacts(self._redis)
        self._passing = Passing()
        self._sinks = Sinks(self._redis, self._passing)
        self._spool = self._open_spool()
        self._client, self._servers, self._decoders = self.loop.run(self._open())
        self._auditor = Auditor()
        self._said = BEFORE
        self.alone = Alone(self._redis, ttl_s=timing.slots_s / 2, slots_ttl_s=timing.slots_s)
        self.marks = Marks(self._redis)
        self.apart = Apart(self.alone, self.calls, self._healthy, self._limit, lambda: self._draining)
        self._closed = threading.Event()
        self._on_room: Callable[[], object] = lambda: None
        self._pulse = threading.Thread(target=self._pulse_on, name="lane-pulse", daemon=True)

    def start(self) -> None:
        """Begin to look for the run and its servers."""
        self._pulse.start()

    def when_room(self, wake: Callable[[], object]) -> None:
        """`wake` is called, from another thread, when more orders may be taken than before."""
        self._on_room = wake

    def room(self, reserved: int) -> int:
        """How many more orders may be taken by a process that holds so many unfinished ones."""
        return 0 if self._draining else max(self.calls.room(reserved), self.apart.room(reserved))

    def run(self, order: Generate | Capture, url: str, view: RunView) -> Result:
        """The order's result; raises what `execute` and `LoopThread.run` raise."""
        context = Context(
            client=self._client,
            spool=self._spool,
            decoders=self._decoders,
            view=view,
            facts=self._servers.facts,
            passing=self._passing,
            auditor=self._auditor,
        )
        result = self.loop.run(self._servers.call(url, execute(order, url, context)))
        if isinstance(result, Responded) and result.response.retractions:
            self._servers.retracted(url, result.response.retractions)
        return result

    def view_now(self) -> RunView | None:
        """The view as Redis has it at this moment; None when there is none or Redis is away.

        `view` is what the last look saw, and servers and slots are those of that look.
        """
        try:
            return read_view(self._redis)
        except (RedisError, OSError):
            return None

    def count(self, what: str, more: int = 1) -> None:
        """Add to a counter of the snapshot."""
        self._account.count(what, more)
        if what == "done":
            self.pause.succeeded()

    def set_aside(self, body: bytes, why: str) -> None:
        """Keep what is no order of ours for a person to look at."""
        self.count("aside")
        set_aside(self._redis, body, why)

    def drain(self) -> None:
        """Take no more orders; those that run go on."""
        self._draining = True

    def cancel(self) -> int:
        """End the calls in flight; how many there were."""
        self._draining = True
        self.stopping.set()
        return self.loop.cancel_all()

    def close(self) -> None:
        """Leave the board and the shares, and end the threads."""
        self._draining = True
        self.stopping.set()
        self._closed.set()
        if self._pulse.is_alive():
            self._pulse.join(self.timing.exit_s)
        with contextlib.suppress(RedisError, OSError):
            self._slots.give_up(self._urls())
            forget_process(self._redis, self.name)
        self.loop.cancel_all()
        with contextlib.suppress(Exception):
            self.loop.start(self._close()).result(self.timing.exit_s)
        self.loop.stop()

    def _open_spool(self) -> Spool:
        config = self.config
        return Spool(config.spool_dir, config.node, config.spool_max_bytes)

    async def _open(self) -> tuple[SGLangClient, ServerPool, DecodePool]:
        client = SGLangClient(self.config.server_api_key)
        return client, ServerPool(client, on_connect=self._on_connect), DecodePool(self._spool)

    async def _close(self) -> None:
        await self._servers.close()
        await self._decoders.close()
        await self._client.close()

    async def _on_connect(self, url: str, facts: ServerFacts, needs: Needs) -> None:
        """Awaited before the server's first call. The pulse tells Redis its facts again if that fails."""
        if self.view is not None:
            await asyncio.to_thread(self._first_facts.check, self.view.run.id, url, facts)
        await probe_spool(self._client, url, facts, needs.capture, self._spool, self._passing)
        with contextlib.suppress(RedisError, OSError):
            await asyncio.to_thread(self._tell_facts, facts)

    def _tell_facts(self, facts: ServerFacts) -> None:
        self._redis.hsetnx(FACTS, facts.facts_id, json.dumps(facts.to_json()))

    def _healthy(self) -> tuple[str, ...]:
        return () if self.pause.on else self._servers.healthy()

    def _limit(self) -> int:
        view = self.view
        return view.settings.concurrency.get(self.lane, 0) if view is not None else 0

    def _urls(self) -> tuple[str, ...]:
        view = self.view
        if view is None:
            return ()
        settings = view.settings
        return (settings.capture_urls or settings.server_urls) if self._captures else settings.server_urls

    @property
    def _captures(self) -> bool:
        return self.lane is LaneName.CAPTURE

    def _pulse_on(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._look()
                self._renew()
                write_process(self._redis, self._snapshot())
            except (RedisError, OSError) as error:
                logger.debug("lane.pulse error=%r", error)
            # The edge of the thread: an error of ours must not leave the lane without slots.
            except Exception:
                logger.exception("lane.pulse failed")
            self._closed.wait(max(0.0, self.timing.pulse_s - (time.monotonic() - began)))

    def _look(self) -> None:
        self._sinks.look()
        self.view = view = read_view(self._redis)
        if view is not None:
            needs = needs_of(view.run.spec, view.settings, captures=self._captures)
            self._servers.want(self._urls(), needs)
        if not self._spool.folder.exists():
            # Somebody tidied up `/tmp`. What was in it is captured again; what comes needs a place.
            logger.warning("spool.gone folder=%s", self._spool.folder)
            try:
                self._spool = self._open_spool()
            except EyasError as error:
                self.pause.begin(error.message)
        # Another order would find the spool as full as the last one did.
        if self.pause.why and not self.pause.on:
            if self._spool.used_bytes() >= self._spool.max_bytes:
                self.pause.go_on()
            else:
                self.pause.clear()

    def _renew(self) -> None:
        urls, limit, healthy = self._urls(), self._limit(), set(self._healthy())
        flying = self.calls.in_flight()
        asked = {
            url: Asked(
                limit=limit,
                capacity=self.calls.capacity if url in healthy and not self._draining else 0,
                in_flight=flying.get(url, 0),
            )
            for url in dict.fromkeys((*urls, *flying))
        }
        asked_at = time.monotonic()
        granted = self._slots.renew(asked) if asked else {}
        self.alone.renew()
        twin = TWIN in granted.values()
        # Others may take what we hold once our record has expired; stop well before that.
        good_s = asked_at + 0.8 * self.timing.slots_s - time.monotonic()
        self.calls.grant({url: max(0, slots) for url, slots in granted.items()}, good_s)
        for facts in tuple(self._servers.facts.values()):
            self._tell_facts(facts)
        self._first_facts.tell()
        said = standing(
            lane=self.lane,
            name=self.name,
            draining=self._draining,
            twin=twin,
            has_run=self.view is not None,
            pause=self.pause,
            limit=limit,
            healthy=len(healthy),
        )
        if said != self._said:
            logger.info("lane.%s why=%r", *said)
            self._said = said
        self._on_room()

    def _snapshot(self) -> ProcessSnapshot:
        return self._account.snapshot(
            said=self._said,
            in_flight=self.calls.in_flight(),
            slots=self.calls.grants(),
            servers=self._servers.snapshot(),
            spool=self._spool,
        )
