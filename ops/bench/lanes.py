"""How full the lanes keep a server, against a bare asyncio loop with the same limits.

    python -m ops.bench.lanes [--quick] [--seconds 5] [--rounds 10] [--short 150] [--long 32]

Both lanes together call one paced server, in a process of its own, that takes the same time for
every call and knows exactly how many are in flight. N is `rounds` × limits, so the best possible
time is `rounds` × `seconds`. The bare loop makes the same N calls with httpx and nothing else:
no queue, no checks, no acknowledgement. Both run in turn in one run of this program.

In flight ÷ limit is the mean from when the limit is first reached until the queues are empty.
"""

import argparse
import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import redis
from httpx_aiohttp import AiohttpTransport

from ops.bench.orders import RUN, orders
from ops.bench.processes import ROOT, cpu_s, rss_mb, running, start, until
from ops.bench.report import Row, print_rows, say
from producer.machine.redis_server import find_redis, free_port, redis_arguments
from storage.run import StatesMode
from storage.settings import RunSettings
from workers.broker.messages import Generate, decode
from workers.broker.publish import publish_many
from workers.celery import create_app
from workers.config import load_config
from workers.runs import RunView, publish_view


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run."""

    seconds: float
    """Of one call."""
    rounds: int
    """N ÷ limits."""
    limits: dict[str, int]
    """Lane → calls in flight."""
    prompt_tokens: int

    @property
    def calls(self) -> int:
        """N."""
        return self.rounds * sum(self.limits.values())


def stats(url: str) -> dict[str, Any]:
    """What the server counted."""
    with urllib.request.urlopen(f"{url}/stats", timeout=30) as reply:
        content: dict[str, Any] = json.load(reply)
        return content


def lanes(plan: Plan, folder: Path, url: str, redis_url: str) -> dict[str, float]:
    """The same calls through the queue and two lane processes."""
    client = redis.Redis.from_url(redis_url)
    app = create_app(load_config({"EYAS_REDIS_URL": redis_url, "EYAS_STATE_DIR": str(folder)}, folder))
    settings = RunSettings(
        server_urls=(url,),
        capture_urls=(),
        concurrency=plan.limits,
        max_input_tokens=32_000,
        states=StatesMode.OFF,
        capture=None,
    )
    publish_view(client, RunView(run=RUN, settings=settings, output_dir=str(folder)))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("EYAS_")} | {
        "EYAS_REDIS_URL": redis_url,
        "EYAS_SPOOL_DIR": str(folder / "spool"),
        "EYAS_STATE_DIR": str(folder),
        "EYAS_NODE": "bench",
        "PYTHONPATH": str(ROOT),
    }
    workers = {
        lane: start(
            [
                *(sys.executable, "-m", "celery", "-A", "workers", "worker", "-P", "threads", "-E"),
                *("-c", str(limit), "-Q", lane, "-n", f"{lane}@bench"),
            ],
            folder / f"{lane}.log",
            env=environ,
        )
        for lane, limit in plan.limits.items()
    }
    with running(list(workers.values())):

        def ready(lane: str) -> bool:
            data = client.get(f"eyas:process:{lane}@bench")
            servers = json.loads(data)["servers"] if data else []
            return bool(servers) and servers[0]["slots"] == plan.limits[lane]

        until(lambda: all(map(ready, workers)), "the lanes have their slots", 60)
        work = [
            order
            for lane, limit in plan.limits.items()
            for order in orders(lane, plan.rounds * limit, plan.prompt_tokens)
        ]
        idle_cpu = {lane: cpu_s(worker.pid) for lane, worker in workers.items()}
        limit = sum(plan.limits.values())
        first = stats(url)
        began = time.perf_counter()
        publish_many(app, work)
        published_s = time.perf_counter() - began
        full = until(lambda: (s := stats(url))["in_flight"] >= limit and s, "the limit is reached", 60)
        rss = dict.fromkeys(workers, 0.0)
        last = full
        while any(client.llen(lane) for lane in plan.limits):
            last = stats(url)
            rss = {lane: max(rss[lane], rss_mb(worker.pid)) for lane, worker in workers.items()}
            time.sleep(0.1)
        until(lambda: client.llen("sink") >= len(work), "every result is there", 60 + 10 * plan.seconds)
        elapsed = time.perf_counter() - began
        end = stats(url)
        used = {lane: cpu_s(worker.pid) - idle_cpu[lane] for lane, worker in workers.items()}
    assert end["ended"] - first["ended"] == len(work)
    done = {decode(_body(raw)).response.id for raw in client.lrange("sink", 0, -1)}  # type: ignore[union-attr]
    assert done == {order.id for order in work}
    app.close()
    return {
        "elapsed_s": elapsed,
        "fill": (last["integral"] - full["integral"]) / (last["at"] - full["at"]) / limit,
        "peak": end["peak"],
        "publish_us": published_s / len(work) * 1e6,
        "cpu_ms_per_call": 1000 * sum(used.values()) / len(work),
        **{f"rss_mb_{lane}": mb for lane, mb in rss.items()},
    }


async def bare(plan: Plan, url: str) -> float:
    """The same calls from one asyncio loop, with httpx and a semaphore a lane.

    Over aiohttp's transport, which the lanes use too: httpx's own takes three times as long with
    this many connections on a busy machine, and would flatter us.
    """
    transport = AiohttpTransport(
        client=lambda: aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    )
    async with httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:

        async def call(order: Generate, free: asyncio.Semaphore) -> None:
            async with free:
                body = {
                    "input_ids": order.prompt.tolist(),
                    "rid": order.id.hex(),
                    "sampling_params": {"max_new_tokens": 512},
                }
                reply = await client.post(f"{url}/generate", json=body)
                assert len(reply.json()["output_ids"])

        work = []
        for lane, limit in plan.limits.items():
            free = asyncio.Semaphore(limit)
            work += [call(order, free) for order in orders(lane, plan.rounds * limit, plan.prompt_tokens)]
        began = time.perf_counter()
        await asyncio.gather(*work)
        return time.perf_counter() - began


def message_bytes(redis_url: str, folder: Path, tokens: int) -> dict[str, float]:
    """What a message takes in Redis: its text, and with what Redis adds."""
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    app = create_app(load_config({"EYAS_REDIS_URL": redis_url, "EYAS_STATE_DIR": str(folder)}, folder))
    count = 200
    publish_many(app, orders("short", count, tokens))
    used = client.memory_usage("short", samples=0) / count
    text = sum(map(len, client.lrange("short", 0, -1))) / count
    app.close()
    client.flushall()
    return {"tokens": tokens, "bytes": round(text), "bytes_in_redis": round(used)}


def _body(raw: bytes) -> bytes:
    import msgpack

    body: bytes = msgpack.unpackb(base64.b64decode(json.loads(raw)["body"]))[0][0]
    return body


def main() -> None:
    """Measure and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="calls of 1 s, 4 rounds: shows that it runs")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--short", type=int, default=150)
    parser.add_argument("--long", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    arguments = parser.parse_args()
    plan = Plan(
        seconds=1.0 if arguments.quick else arguments.seconds,
        rounds=4 if arguments.quick else arguments.rounds,
        limits={"short": arguments.short, "long": arguments.long},
        prompt_tokens=arguments.prompt_tokens,
    )
    folder = Path(tempfile.mkdtemp(prefix="eyas-bench-"))
    port = free_port()
    redis_process = start(
        redis_arguments(find_redis(), folder=folder, port=port, password=None), folder / "redis.log"
    )
    server = start(
        [sys.executable, "-m", "ops.bench.paced_server", "--seconds", str(plan.seconds)],
        folder / "server.log",
        stdout=subprocess.PIPE,
    )
    redis_url = f"redis://127.0.0.1:{port}/0"
    try:
        with running([redis_process, server]):
            assert server.stdout is not None
            url = f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
            until(lambda: _answers(redis_url), "Redis answers", 20)
            sizes = {n: message_bytes(redis_url, folder, n)["bytes_in_redis"] for n in (128, 1024, 4096)}
            before = asyncio.run(bare(plan, url))
            measured = lanes(plan, folder, url, redis_url)
            after = asyncio.run(bare(plan, url))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bare_s = (before + after) / 2
    ideal_s = plan.rounds * plan.seconds
    say(
        f"{plan.calls} calls: bare loop ÷ ideal {before / ideal_s:.3f} before, {after / ideal_s:.3f} after; "
        f"lanes ÷ ideal {measured['elapsed_s'] / ideal_s:.3f}; peak in flight {measured['peak']} of "
        f"{sum(plan.limits.values())}; {measured['publish_us']:.0f} µs to publish a message; "
        f"{measured['cpu_ms_per_call']:.1f} ms of workers' CPU a call"
    )
    rss = max(value for name, value in measured.items() if name.startswith("rss"))
    print_rows(
        [
            Row(what="in flight ÷ limit, mean, 150 + 32 together", measured=measured["fill"], at_least=0.98),
            Row(
                what="time for these calls ÷ a bare asyncio httpx loop",
                measured=measured["elapsed_s"] / bare_s,
                at_most=1.03,
            ),
            Row(what="memory of a lane with 150 in flight", measured=rss, at_most=300, unit="MB"),
            *(
                Row(what=f"bytes in Redis of a prompt of {tokens} tokens", measured=size, unit="B")
                for tokens, size in sizes.items()
            ),
        ]
    )


def _answers(redis_url: str) -> bool:
    try:
        with redis.Redis.from_url(redis_url) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


if __name__ == "__main__":
    main()
