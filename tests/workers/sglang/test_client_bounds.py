"""A server that never stops talking is refused; what it says is never held whole."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from client_stage import staged

from storage.errors import UnsuitableError
from workers.sglang.client import ERROR_BYTES, REPLY_BYTES, SGLangClient
from workers.sglang.outcomes import CallError

CHUNK = b" " * (1 << 20)
AHEAD_BYTES = 32 << 20
"""What may lie in sockets and buffers between the two."""


class Talker:
    """Sends chunks until its client leaves."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.sent_bytes = 0
        self.left = asyncio.Event()

    async def __call__(self, request: web.Request, body: dict[str, Any] | None = None) -> web.StreamResponse:
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        try:
            while True:
                await response.write(CHUNK)
                self.sent_bytes += len(CHUNK)
        finally:
            self.left.set()


@pytest.mark.parametrize(("status", "most"), [(200, REPLY_BYTES), (400, ERROR_BYTES)])
def test_a_reply_without_end_is_cut_off(status: int, most: int) -> None:
    async def run() -> None:
        talker = Talker(status)
        async with staged() as server, SGLangClient() as client:
            server.generate = talker
            with pytest.raises(CallError) as refused:
                await client.generate(server.url, {"rid": "r", "input_ids": [1]}, deadline_s=60)
            assert refused.value.code == ("reply.garbage" if status == 200 else "server.refused")
            await asyncio.wait_for(talker.left.wait(), 20)
            assert talker.sent_bytes < most + AHEAD_BYTES

    asyncio.run(run())


def test_a_reply_into_a_file_ends_at_its_bound(tmp_path: Path) -> None:
    async def run() -> None:
        talker = Talker()
        async with staged() as server, SGLangClient() as client:
            server.generate = talker
            with pytest.raises(CallError, match="longer than `2000000` bytes"):
                await client.generate_to_file(
                    server.url,
                    {"rid": "r", "input_ids": [1]},
                    tmp_path / "reply",
                    max_bytes=2_000_000,
                    deadline_s=60,
                )
            assert (tmp_path / "reply").stat().st_size <= 2_000_000

    asyncio.run(run())


def test_facts_without_end_are_no_server_s() -> None:
    async def run() -> None:
        talker = Talker()

        async def handle(request: web.Request) -> web.StreamResponse:
            return await talker(request)

        app = web.Application()
        app.router.add_get("/{path:.*}", handle)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with SGLangClient() as client:
                with pytest.raises(UnsuitableError) as refused:
                    await client.facts(url)
                assert refused.value.code == "server.not_sglang"
                assert talker.sent_bytes < REPLY_BYTES + AHEAD_BYTES
        finally:
            await runner.cleanup()

    asyncio.run(run())
