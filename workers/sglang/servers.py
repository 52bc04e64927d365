"""Which servers a lane may call: each is connected, watched, left when it goes, and found again.

Lives on the lane's one event loop; what other threads read is replaced whole. What is known of one is in
`server.py`. It does not choose among servers or count slots (the lane does), nor make the calls
(`execute.py`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from storage.errors import EyasError, UnsuitableError
from workers.board.processes import ServerSnapshot, ServerState
from workers.sglang.client import SGLangClient
from workers.sglang.facts import ServerFacts
from workers.sglang.loads import Loads
from workers.sglang.looking import Sign, look, rest
from workers.sglang.outcomes import CallError, ServerAwayError
from workers.sglang.pace import Pace
from workers.sglang.server import Server
from workers.sglang.suitability import Needs, check_suitable

T = TypeVar("T")
log = logging.getLogger(__name__)


class ServerPool:
    """The servers of one lane process. To be made and closed on its event loop."""

    def __init__(
        self,
        client: SGLangClient,
        *,
        on_connect: Callable[[str, ServerFacts, Needs], Awaitable[None]] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`on_connect` is awaited with address, facts and needs before a server's first call; while it
        fails, none is made.
        """
        self._client = client
        self._on_connect = on_connect
        self._pace = pace or Pace()
        self._loop = asyncio.get_running_loop()
        self._needs: Needs | None = None
        self._servers: dict[str, Server] = {}
        self._facts: Mapping[str, ServerFacts] = MappingProxyType({})
        self._loads = Loads(client, self.healthy)
        self._following = self._loop.create_task(self._loads.follow())

    @property
    def facts(self) -> Mapping[str, ServerFacts]:
        """Address → facts, of the servers that take calls now; safe to read from any thread."""
        return self._facts

    def healthy(self) -> tuple[str, ...]:
        """The servers that take calls now, in the order wanted; safe from any thread."""
        return tuple(self._facts)

    def snapshot(self) -> tuple[ServerSnapshot, ...]:
        """Every wanted server as this process sees it, its slots left at 0; safe from any thread."""
        return tuple(
            replace(
                self._loads.complete(server.snapshot),
                in_flight=len(server.calls),
                facts_id=server.facts.facts_id if server.facts else "",
            )
            for server in list(self._servers.values())
        )

    def retracted(self, url: str, times: int) -> None:
        """A reply said that the server took the request back so often; safe from any thread."""
        self._loads.retracted(url, times)

    def want(self, urls: Sequence[str], needs: Needs) -> None:
        """Use these servers, for this, from now on; safe from any thread, and cheap to repeat."""
        self._loop.call_soon_threadsafe(self._want, tuple(dict.fromkeys(urls)), needs)

    def mark_away(self, url: str, error: ServerAwayError) -> None:
        """Send no more calls to a server until a probe has come back; safe from any thread."""
        self._loop.call_soon_threadsafe(self._leave, url, error)

    async def call(self, url: str, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns, and the server marked away when it raises `ServerAwayError`.

        Raises `ServerAwayError` too when the server is found to hang while the work waits.
        """
        server = self._servers.get(url)
        if server is None:
            work.close()
            raise ServerAwayError(f"{url} is not wanted any more", code="server.unreachable")
        task = self._loop.create_task(self._send(url, server, work))
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it never began
        server.calls[task] = None
        try:
            return await task
        except ServerAwayError as error:
            self._leave(url, error)
            raise
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if server.lost is not None and caller is not None and not caller.cancelling():
                raise ServerAwayError(
                    server.lost.message, code=server.lost.code, in_flight=server.lost.in_flight
                ) from None
            raise
        finally:
            server.calls.pop(task, None)

    async def _send(self, url: str, server: Server, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns, begun once the server is known to be the one that was connected.

        A restart breaks the connection of a call that runs. When none runs and nothing was heard for a
        moment, another server may listen there by now.
        """
        if not server.running and time.monotonic() - server.heard > self._pace.quiet_s:
            server.look = server.look or self._loop.create_task(self._look(url, server))
            error = await asyncio.shield(server.look)
            if error is not None:
                raise error
        server.running += 1
        try:
            result = await work
        finally:
            server.running -= 1
        server.heard = time.monotonic()
        return result

    async def _look(self, url: str, server: Server) -> ServerAwayError | None:
        """None when it is what it was when connected; one look serves all calls that wait for it."""
        try:
            if await self._client.facts(url) == server.facts:
                server.heard = time.monotonic()
                return None
            return ServerAwayError(f"{url} is not what it was", code="server.changed")
        except ServerAwayError as error:
            return error
        except UnsuitableError as error:
            return ServerAwayError(error.message, code="server.changed")
        finally:
            server.look = None

    async def close(self) -> None:
        """Stop watching; calls in flight are the callers' to end."""
        tasks = [self._following, *(server.task for server in self._servers.values() if server.task)]
        self._servers.clear()
        self._publish()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _want(self, urls: tuple[str, ...], needs: Needs) -> None:
        if needs != self._needs:
            self._needs = needs
            for server in self._servers.values():
                server.woken.set()
        if urls == tuple(self._servers):
            return
        before, self._servers = self._servers, {}
        for url in urls:
            if url in before:
                server = before.pop(url)
            else:
                unknown = ServerSnapshot(url=url, state=ServerState.UNKNOWN, since=time.time())
                server = Server(snapshot=unknown)
                server.task = self._loop.create_task(self._keep(url, server))
            self._servers[url] = server
        for left in before.values():
            if left.task:
                left.task.cancel()
        self._publish()

    async def _keep(self, url: str, server: Server) -> None:
        """Connect, watch, and connect again, for as long as the server is wanted."""
        failures = 0
        while True:
            server.woken.clear()
            try:
                facts = await self._connect(url, server)
            except UnsuitableError as error:
                failures = 0
                self._set(server, ServerState.UNSUITABLE, error)
                pause_s = self._pace.recheck_s
            except (ServerAwayError, CallError) as error:
                failures += 1
                self._set(server, ServerState.AWAY, error)
                pause_s = self._pace.reconnect.pause_s(failures)
            except Exception as error:  # the edge of this task: ended, its server would be lost for good
                log.exception("server.failed url=%s", url)
                failures += 1
                unknown = ServerAwayError(f"{url}: {error!r}", code="server.unreachable")
                self._set(server, ServerState.AWAY, unknown)
                pause_s = self._pace.reconnect.pause_s(failures)
            else:
                failures = 0
                server.facts, server.lost, server.heard = facts, None, time.monotonic()
                self._set(server, ServerState.UP)
                await self._watch(url, server, facts)
                # Left, or something changed: a moment, so that a flapping server is not hammered.
                pause_s = self._pace.reconnect.pause_s(1) if server.lost else 0.0
                server.woken.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.woken.wait(), pause_s)

    async def _connect(self, url: str, server: Server) -> ServerFacts:
        """The facts of a server that suits the run and has just generated a token."""
        needs = self._needs
        assert needs is not None
        facts = await self._client.facts(url)
        check_suitable(facts, needs, url)
        if server.snapshot.state is not ServerState.UP or facts != server.facts:
            stock = needs.capture if facts.states == "json" else None
            await self._client.probe(url, sampling=needs.sampling, capture=stock)
            if self._on_connect is not None:
                await self._on_connect(url, facts, needs)
        return facts

    async def _watch(self, url: str, server: Server, facts: ServerFacts) -> None:
        """Returns when the server was left, is found hanging or changed, or something else is needed."""
        strikes = 0
        while not await rest(server.woken, server.silent_s, self._pace, strikes):
            sign = await look(self._client, url, self._pace, partial(self._doubt, url, server))
            if sign is Sign.ADVANCES:
                strikes, server.heard = 0, time.monotonic()
                if server.snapshot.state is ServerState.SUSPECT:
                    self._set(server, ServerState.UP)
                if await self._changed(url, facts):
                    return
                continue
            strikes = self._pace.strikes if sign is Sign.MUTE else strikes + 1
            if strikes >= self._pace.strikes and not server.woken.is_set():
                why = "answers nothing" if sign is Sign.MUTE else f"produced no token in `{strikes}` looks"
                self._leave(url, ServerAwayError(f"{url} {why}", code="server.hanging", in_flight=True))
                # No call will end by itself before its deadline, an hour away.
                for task in list(server.calls):
                    task.cancel()

    def _doubt(self, url: str, server: Server) -> None:
        if server.snapshot.state is ServerState.UP and server.running:
            silent = f"{url} has produced no token for `{time.monotonic() - server.heard:.0f}` s"
            self._set(server, ServerState.SUSPECT, ServerAwayError(silent, code="server.hanging"))

    async def _changed(self, url: str, facts: ServerFacts) -> bool:
        """Whether it is not what it was; a busy server that does not say is not changed."""
        try:
            return await self._client.facts(url) != facts
        except ServerAwayError:
            return False
        except UnsuitableError:
            return True

    def _leave(self, url: str, error: ServerAwayError) -> None:
        server = self._servers.get(url)
        if server is None or server.snapshot.state not in (ServerState.UP, ServerState.SUSPECT):
            return
        server.lost = error
        self._set(server, ServerState.AWAY, error)
        server.woken.set()

    def _set(self, server: Server, state: ServerState, error: EyasError | None = None) -> None:
        server.become(state, error)
        self._publish()

    def _publish(self) -> None:
        """Swap in what other threads see, in one assignment."""
        self._facts = MappingProxyType(
            {
                url: server.facts
                for url, server in self._servers.items()
                if server.facts is not None and server.snapshot.state is ServerState.UP
            }
        )
