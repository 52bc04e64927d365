"""httpx's own transport against httpx-aiohttp, and bare aiohttp as the floor: why the client uses which.

150 calls in flight at a server that answers 10 KB after a pause, then 64 MB bodies streamed to a
file. CPU per call and added latency are the client process's own; the server is another process.
Prints one line a measure and, last, the ratios. `python -m ops.bench.client [--quick]`.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import httpx
from aiohttp import web
from httpx_aiohttp import AiohttpTransport

from ops.bench.report import Row, print_rows, say

IN_FLIGHT = 150
ROUNDS = 6
PAUSE_S = 0.5
BODY = json.dumps({"text": "word " * 400, "output_ids": list(range(1000, 2500)), "meta_info": {}}).encode()
BIG = b"0.12345678," * (64_000_000 // 11)
ASKED = {"input_ids": list(range(800)), "sampling_params": {"max_new_tokens": 512}}

Call = Callable[[str], Awaitable[int]]


def serve(port: int) -> None:
    """Answer `/generate` after a pause and `/states` with a big body."""

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(PAUSE_S)
        return web.Response(body=BODY, content_type="application/json")

    async def states(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=BIG)

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/generate", generate), web.post("/states", states)])
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


async def through_httpx(transport: httpx.AsyncBaseTransport | None, url: str, big: int) -> dict[str, float]:
    """Both measures through httpx with this transport, None for its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(transport=transport, timeout=None, limits=limits, trust_env=False) as client:

        async def call() -> int:
            response = await client.post(f"{url}/generate", json=ASKED)
            return len(response.json()["output_ids"])

        async def stream(path: Path) -> None:
            async with client.stream("POST", f"{url}/states", json=ASKED) as response:
                with path.open("wb") as file:
                    async for chunk in response.aiter_raw():
                        file.write(chunk)

        return await measure(call, stream, big)


async def through_aiohttp(url: str, big: int) -> dict[str, float]:
    """Both measures without httpx."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def call() -> int:
            async with session.post(f"{url}/generate", json=ASKED) as response:
                return len((await response.json())["output_ids"])

        async def stream(path: Path) -> None:
            async with session.post(f"{url}/states", json=ASKED) as response:
                with path.open("wb") as file:
                    async for chunk in response.content.iter_chunked(1 << 18):
                        file.write(chunk)

        return await measure(call, stream, big)


async def measure(
    call: Callable[[], Awaitable[int]], stream: Callable[[Path], Awaitable[None]], big: int
) -> dict[str, float]:
    """CPU and added latency of a call at full load, and of streaming a big body."""
    added: list[float] = []

    async def one() -> None:
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            await call()
            added.append(time.perf_counter() - begun - PAUSE_S)

    await asyncio.gather(*(call() for _ in range(IN_FLIGHT)))  # connections are open before the clock runs
    cpu = time.process_time()
    await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))
    cpu = time.process_time() - cpu
    big_cpu, big_wall = time.process_time(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(big):
            await stream(Path(folder) / "body")
    size = big * len(BIG) / 1e6
    return {
        "cpu_ms_per_call": 1000 * cpu / (IN_FLIGHT * ROUNDS),
        "added_p50_ms": 1000 * statistics.median(added),
        "added_p95_ms": 1000 * statistics.quantiles(added, n=20)[-1],
        "stream_mb_per_s": size / (time.perf_counter() - big_wall),
        "stream_cpu_ms_per_mb": 1000 * (time.process_time() - big_cpu) / size,
    }


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="stream one large body instead of two")
    bodies = 1 if parser.parse_args().quick else 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(port)
        found = {}
        for name in ("httpx", "httpx-aiohttp", "aiohttp"):
            if name == "aiohttp":
                found[name] = asyncio.run(through_aiohttp(url, bodies))
            else:
                found[name] = asyncio.run(
                    through_httpx(aiohttp_transport() if name == "httpx-aiohttp" else None, url, bodies)
                )
            say(f"{name} " + " ".join(f"{key}={value:.2f}" for key, value in found[name].items()))
    finally:
        server.terminate()
        server.join()
    own, ours = found["httpx"], found["httpx-aiohttp"]
    ratios = {key: ours[key] / own[key] for key in own}
    print_rows(Row(what=f"httpx-aiohttp ÷ httpx: {key}", measured=value) for key, value in ratios.items())


def aiohttp_transport() -> httpx.AsyncBaseTransport:
    """httpx-aiohttp without aiohttp's default of 100 connections."""
    return AiohttpTransport(client=lambda: aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))


def wait_for(port: int) -> None:
    """Wait until the port is open, at most 20 s."""
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    main()
