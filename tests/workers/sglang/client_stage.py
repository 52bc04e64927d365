"""A stage for the client's tests: a real HTTP server that replays recorded replies and misbehaves.

It knows no model; what it says is told to it. Times in tests are conditions, never pauses.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

RECORDED = Path(__file__).parent / "recorded"
Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def recorded(name: str) -> dict[str, Any]:
    """One exchange with a real SGLang 0.5.23: request, status, body."""
    content: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_bytes())
    return content


class Stage:
    """The server: `generate` answers calls, `probe` the one-token probe, `infos` the rest."""

    def __init__(self, flavour: str = "final") -> None:
        self.infos: dict[str, Any] = {
            "/server_info": recorded(f"{flavour}-server_info")["body"],
            "/model_info": recorded(f"{flavour}-model_info")["body"],
            "/v1/models": recorded(f"{flavour}-models")["body"],
        }
        self.generate: Handler = answer()
        self.probe: Handler = answer()
        self.spooled: Handler = refuse(404, {"detail": "Not Found"})
        """Answers GET and DELETE of `/eyas/spool/…`; a server without the plugin has no such route."""
        self.health_status = 200
        self.health_hangs, self.ready_hangs = asyncio.Event(), asyncio.Event()
        """Cleared, `/health_generate` or `/ready` is not answered until they are set."""
        self.health_hangs.set()
        self.ready_hangs.set()
        self.port = 0
        self.bodies: list[dict[str, Any]] = []
        self.probed: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.left = asyncio.Event()
        """Set when a client leaves in mid-call."""
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def probes(self) -> int:
        return len(self.probed)

    async def open(self) -> None:
        """Listen, on the port of before when there was one."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_route("*", "/eyas/spool/{name}", self._spooled)
        app.router.add_get("/{path:.*}", self._info)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        assert self._runner.addresses
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Die: calls in flight are dropped, then connections are refused."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        try:
            if body["input_ids"] == [1, 2]:
                self.probed.append(body)
                return await self.probe(request, body)
            self.bodies.append(body)
            return await self.generate(request, body)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _spooled(self, request: web.Request) -> web.StreamResponse:
        return await self.spooled(request, {})

    async def _info(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.path == "/health_generate":
            await self.health_hangs.wait()
            return web.Response(status=self.health_status)
        if request.path == "/ready":
            await self.ready_hangs.wait()
            return web.Response(text="")
        found = self.infos.get(request.path)
        if isinstance(found, int):
            return web.json_response({"error": "Unauthorized"}, status=found)
        return web.Response(status=404) if found is None else web.json_response(found)


@asynccontextmanager
async def staged(flavour: str = "final") -> AsyncIterator[Stage]:
    """A stage that listens."""
    stage = Stage(flavour)
    await stage.open()
    try:
        yield stage
    finally:
        await stage.close()


def answer(new: int | None = None, *, states: Any = None, **meta: Any) -> Handler:
    """A good reply to whatever is asked; `meta` overrides what it says of itself."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(reply_to(body, new, states=states, **meta))

    return handle


def reply_to(
    body: dict[str, Any], new: int | None = None, *, states: Any = None, **meta: Any
) -> dict[str, Any]:
    """A reply with the shape of a recorded one, as long as was asked for."""
    count = new or body["sampling_params"]["max_new_tokens"]
    content = recorded("final-response")["body"]
    output = [5 + i % 100 for i in range(count)]
    said = {
        "id": body.get("rid", "none"),
        "finish_reason": {"type": "length", "length": count},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": count,
        "cached_tokens": 0,
        "num_retractions": 0,
    }
    if states is not None:
        said["hidden_states"] = states(len(body["input_ids"]), count) if callable(states) else states
    elif body.get("return_hidden_states"):
        said["hidden_states"] = rows(len(body["input_ids"]), count)
    return {"text": content["text"], "output_ids": output, "meta_info": content["meta_info"] | said | meta}


def rows(prompt: int, new: int, width: int = 128) -> list[Any]:
    """Hidden states nested as a stock server nests them, every value a bf16."""
    block = [[1.0 + (t % 64) / 64.0] * width for t in range(prompt + new - 1)]
    return [block[:prompt], *block[prompt:]]


def refuse(status: int, body: Any) -> Handler:
    """An answer other than 200."""

    async def handle(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handle


def raw(data: bytes) -> Handler:
    """These bytes, as a 200."""

    async def handle(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=data, content_type="application/json")

    return handle


async def hang(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def reset(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    """Drop the connection before a word."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def cut(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    """Promise a long body, send some of it, and drop the connection."""
    response = web.StreamResponse(headers={"Content-Length": "100000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"text": "')
    assert request.transport is not None
    request.transport.abort()
    return response


def in_turn(*handlers: Handler) -> Handler:
    """Each call its own behaviour; the last one stays."""
    left = list(handlers)

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(request, body)

    return handle


async def until(condition: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    """Returns when the condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)
