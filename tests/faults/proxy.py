"""A misbehaving HTTP proxy before a server: it hangs, says 503, is slow, breaks and spoils replies.

Raw sockets on an event loop of its own thread, so that a reply can end where no library would end it.
What a spoiled reply holds is `spoiling.py`'s. One request a connection.
"""

import asyncio
import json
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.faults.spoiling import BYTES, spoil

Mode = Literal["pass", "hang", "unavailable", "slow"]
"""`hang`: nothing more is generated, and `/health` still says 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    raw: bytes
    body: bytes

    @property
    def is_order(self) -> bool:
        """Whether it is a call of a lane, and not the probe of two tokens."""
        return self.path == "/generate" and len(self.tokens) > 2

    @property
    def tokens(self) -> list[int]:
        try:
            return list(json.loads(self.body)["input_ids"])
        except (ValueError, KeyError, TypeError):
            return []


class Proxy:
    """Forwards to `upstream` on loopback; its behaviour may be changed at any time, from any thread."""

    def __init__(self, *, port: int, upstream: int, spool_dir: Path, seed: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.mode: Mode = "pass"
        self.spoils: tuple[str, ...] = ()
        """Ways in which replies are spoiled now; empty for none."""
        self.share = 0.5
        """Of the replies that may be spoiled."""
        self.most = 2
        """How often calls for the same tokens are spoiled: three failures are a dead letter."""
        self.spoiled: Counter[str] = Counter()
        """Way → how often."""
        self.calls: Counter[tuple[int, ...]] = Counter()
        """Tokens → calls of lanes forwarded."""
        self.in_flight = 0
        self.on_order: Callable[[Request], None] = lambda _: None
        """Called with each order before it is forwarded."""
        self._port, self._upstream, self._spool_dir = port, upstream, spool_dir
        self._dice = random.Random(seed)
        self._failures: Counter[tuple[int, ...]] = Counter()
        self._last = b""
        self._loop = asyncio.new_event_loop()
        self._listening: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.accept()

    def accept(self) -> None:
        """Listen."""
        self._do(self._accept())

    def refuse(self) -> None:
        """Listen no more and break every connection: the host is gone."""
        self._do(self._refuse())

    def drop(self) -> None:
        """Break every connection and go on."""
        self._do(self._drop())

    def close(self) -> None:
        """End everything; no connection and no task is left."""
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: "asyncio._CoroutineLike[None]") -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _accept(self) -> None:
        if self._listening is None:
            self._listening = socket.create_server(("127.0.0.1", self._port), backlog=1024)
            self._listening.setblocking(False)
            self._accepting = self._loop.create_task(self._accept_on(self._listening))

    async def _accept_on(self, listening: socket.socket) -> None:
        # not asyncio's server: closed while a client comes, it leaves that one's socket to nobody
        while True:
            connection, _ = await self._loop.sock_accept(listening)
            reader, writer = await asyncio.open_connection(sock=connection)
            task = self._loop.create_task(self._serve(reader, writer))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _refuse(self) -> None:
        if self._listening is not None:
            self._accepting.cancel()
            self._listening.close()
            self._listening = None
        await self._drop()

    async def _end(self) -> None:
        await self._refuse()
        me = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not me]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # closed transports give their sockets back in a later turn

    async def _drop(self) -> None:
        for writer in list(self._connections):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            request = await _read_request(reader)
            if request is not None:
                await self._answer(request, reader, writer)
        except (OSError, asyncio.IncompleteReadError, ValueError):
            _reset(writer)
        finally:
            self._connections.discard(writer)
            with suppress(OSError):
                writer.close()

    async def _answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        mode = self.mode
        if mode == "hang" and request.path in ("/generate", "/health_generate"):
            await reader.read(1)  # until the client leaves, or the connection is broken
            return
        if mode == "unavailable" and request.path in ("/generate", "/health", "/health_generate", "/ready"):
            await _send(writer, 503, b'{"error": {"message": "The server is draining"}}')
            return
        if request.is_order:
            self.calls[tuple(request.tokens)] += 1
            self.on_order(request)
            if mode == "slow":
                await asyncio.sleep(self._dice.uniform(1, 5))
        self.in_flight += 1
        try:
            answer = await self._forward(request, reader)
        finally:
            self.in_flight -= 1
        if answer is None:
            _reset(writer)
            return
        status, body = answer
        if request.is_order and status == 200 and self.spoils:
            await self._spoil(request, body, writer)
        else:
            await _send(writer, status, body)
        if request.is_order and status == 200:
            self._last = body

    async def _spoil(self, request: Request, body: bytes, writer: asyncio.StreamWriter) -> None:
        key = tuple(request.tokens)
        way = self._dice.choice(self.spoils)
        if self._failures[key] >= self.most or self._dice.random() > self.share:
            await _send(writer, 200, body)
            return
        altered = body if way in BYTES else spoil(way, body, self._spool_dir, self._dice)
        if altered is None:
            await _send(writer, 200, body)
            return
        self._failures[key] += 1
        self.spoiled[way] += 1
        if way == "reset in mid-reply":
            await _send(writer, 200, body, only=len(body) // 2)
            _reset(writer)
        elif way == "truncated":
            await _send(writer, 200, body[: len(body) // 2])
        elif way == "duplicated":
            await _send(writer, 200, self._last if self._last and self._dice.random() < 0.5 else body + body)
        elif way == "status 500":
            await _send(writer, 500, b'{"error": {"message": "CUDA error"}}')
        else:
            await _send(writer, 200, altered)

    async def _forward(self, request: Request, reader: asyncio.StreamReader) -> tuple[int, bytes] | None:
        """The server's answer; None when it broke off, or the client left first."""
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            return None
        try:
            to_server.write(request.raw)
            answering = asyncio.ensure_future(_read_answer(from_server))
            leaving = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not answering.done():
                answering.cancel()
                return None
            return answering.result()
        finally:
            to_server.close()


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    length = 0
    kept = []
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            length = int(value)
        if name.lower() != "connection":
            kept.append(line)
    body = await reader.readexactly(length)
    raw = "\r\n".join([first, *kept, "Connection: close", "", ""]).encode("latin-1") + body
    return Request(method=method, path=path, raw=raw, body=body)


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        return status, await reader.readexactly(length)
    except (OSError, asyncio.IncompleteReadError, StopIteration, ValueError, IndexError):
        return None


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes, only: int | None = None) -> None:
    """The answer; with `only`, no more than so many bytes of the body it announced."""
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body[:only])
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection with a RST, as a process that died does."""
    with suppress(OSError):
        own = writer.get_extra_info("socket")
        if own is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport = writer.transport
    if transport is not None:
        transport.abort()
