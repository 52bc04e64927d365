"""A server that takes a set time for each call and counts what is in flight: for benches and tests.

It speaks SGLang's routes, answers with made-up tokens and states, and runs in a process of its
own. `GET /stats` says what it saw; `POST /set` changes its pace or makes it fail. The embedded
engine is the one that computes anything.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections import Counter
from typing import Any

from aiohttp import web

TOKENS = 16
"""Length of every response, unless fewer are asked for."""
HIDDEN = 4
"""Size of the states: final ones, as a stock server gives them."""
MODEL = "paced"
INFO = {
    "model_path": MODEL,
    "tokenizer_path": MODEL,
    "version": "0.0.0",
    "context_length": 32768,
    "max_req_input_len": 32000,
    "enable_return_hidden_states": True,
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
    "kv_cache_dtype": "bfloat16",
}


class PacedServer:
    """Counts calls; the integral of those in flight over time gives their mean exactly."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.failing: str | None = None
        """None; `503`; `drop`: the connection is closed without a word; `calls`: 401, but not to a probe."""
        self.in_flight = self.peak = self.ended = self.left = 0
        self.started: Counter[str] = Counter()
        """Calls begun per prompt, by its first ids."""
        self._integral = 0.0
        self._changed = time.monotonic()
        self._release = asyncio.Event()

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self._integral += self.in_flight * (now - self._changed)
        self._changed = now
        self.in_flight += change
        self.peak = max(self.peak, self.in_flight)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One call."""
        body = await request.json()
        if self.failing == "503":
            return web.json_response({"error": {"message": "queue full"}}, status=503)
        if self.failing == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if body["input_ids"] == [1, 2]:
            return web.json_response(_reply(body, 1, 0.0))
        if self.failing == "calls":
            return web.json_response({"error": {"message": "not you"}}, status=401)
        self._count(+1)
        self.started[",".join(map(str, body["input_ids"][:4]))] += 1
        try:
            try:
                async with asyncio.timeout(self.seconds):
                    await self._release.wait()
            except TimeoutError:
                pass
            self.ended += 1
            tokens = min(TOKENS, body["sampling_params"].get("max_new_tokens", TOKENS))
            return web.json_response(_reply(body, tokens, self.seconds))
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self._count(-1)

    async def stats(self, request: web.Request) -> web.Response:
        """What was seen since the last `reset`."""
        self._count(0)
        return web.json_response(
            {
                "at": self._changed,
                "in_flight": self.in_flight,
                "peak": self.peak,
                "ended": self.ended,
                "left": self.left,
                "integral": self._integral,
                "started": self.started.total(),
                "prompts": len(self.started),
                "most": max(self.started.values(), default=0),
            }
        )

    async def set(self, request: web.Request) -> web.Response:
        """`seconds`, `failing`, `release` (end all calls now), `reset_peak`."""
        body = await request.json()
        self.seconds = body.get("seconds", self.seconds)
        self.failing = body.get("failing", self.failing) or None
        if body.get("release"):
            self._release.set()
            self._release = asyncio.Event()
        if body.get("reset_peak"):
            self.peak = self.in_flight
        return web.json_response({})


def _reply(body: dict[str, Any], tokens: int, seconds: float) -> dict[str, Any]:
    meta = {
        "id": body.get("rid", ""),
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "e2e_latency": seconds,
        "weight_version": "default",
    }
    if body.get("return_hidden_states"):
        row = [0.5 + i for i in range(HIDDEN)]
        meta["hidden_states"] = [[row] * len(body["input_ids"]), *[row] * (tokens - 1)]
    return {
        "text": "words " * tokens,
        "output_ids": [5 + i % 90 for i in range(tokens - 1)] + [2],
        "meta_info": meta,
    }


def main() -> None:
    """Serve until killed; the port is written to stdout once it listens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()

    async def info(request: web.Request) -> web.Response:
        return web.json_response(INFO)

    async def model(request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": MODEL, "weight_version": "default", "architectures": ["Paced"]}
        )

    async def well(request: web.Request) -> web.Response:
        return web.Response(status=503 if server.failing in ("503", "drop") else 200)

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", server.generate)
        app.router.add_get("/stats", server.stats)
        app.router.add_post("/set", server.set)
        app.router.add_get("/server_info", info)
        app.router.add_get("/model_info", model)
        app.router.add_get("/health_generate", well)
        app.router.add_get("/ready", well)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", options.port, backlog=1024).start()
        print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
        await asyncio.Event().wait()

    server = PacedServer(options.seconds)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


if __name__ == "__main__":
    main()
