"""What servers say of their load: a real SGLang, the engine, and one that says nothing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from client_stage import staged, until

from tests.engine_process import running_engine
from workers.board.processes import ServerLoad, ServerSnapshot, ServerState
from workers.sglang.client import SGLangClient
from workers.sglang.loads import Loads, read_loads

RECORDED = json.loads((Path(__file__).parent / "recorded" / "loads.json").read_text())
"""Of a real SGLang 0.5.23 with twelve requests in its batch, as it answers `?include=core`."""


def snapshot(url: str) -> ServerSnapshot:
    return ServerSnapshot(url=url, state=ServerState.UP, since=0.0)


def test_a_real_servers_words_are_read() -> None:
    load = read_loads(RECORDED)
    assert load is not None
    (rank,) = RECORDED["loads"]
    assert (load.running, load.queued) == (rank["num_running_reqs"], rank["num_waiting_reqs"])
    assert load.running == 12
    assert load.kv_used == pytest.approx(rank["num_used_tokens"] / rank["max_total_num_tokens"], abs=0.02)


def test_ranks_are_added_up_and_the_fullest_tells_of_the_cache() -> None:
    (rank,) = RECORDED["loads"]
    other = rank | {"num_running_reqs": 3, "num_waiting_reqs": 4, "token_usage": 0.75}
    assert read_loads({"loads": [rank, other]}) == ServerLoad(running=15, queued=4, kv_used=0.75)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"loads": []},
        {"loads": 3},
        {"loads": [{}]},
        {"loads": [{"num_running_reqs": "x"}]},
        {"loads": None},
    ],
)
def test_what_is_no_load_is_none(content: Any) -> None:
    assert read_loads(content) is None


def test_a_server_that_says_nothing_leaves_the_others_and_the_lane_alone() -> None:
    async def play(engine: str) -> None:
        async with staged() as silent, SGLangClient() as client:
            silent.infos["/v1/loads"] = ["no", "load"]
            urls = [engine, silent.url, "http://127.0.0.1:1"]
            loads = Loads(client, lambda: urls, every_s=0.05)
            following = asyncio.create_task(loads.follow())
            await until(lambda: loads.complete(snapshot(engine)).load is not None, "the engine's load")
            assert loads.complete(snapshot(engine)).load == ServerLoad(running=0, queued=0, kv_used=0.0)
            assert loads.complete(snapshot(silent.url)).load is None
            assert loads.complete(snapshot(urls[2])).load is None
            urls.remove(engine)
            await until(lambda: loads.complete(snapshot(engine)).load is None, "its leaving")
            assert not following.done()
            following.cancel()

    with running_engine() as engine:
        asyncio.run(play(engine.url))


def test_retractions_are_counted_for_each_server() -> None:
    async def play() -> None:
        async with SGLangClient() as client:
            loads = Loads(client, tuple)
            loads.retracted("http://a", 2)
            loads.retracted("http://a", 1)
            assert loads.complete(snapshot("http://a")).retractions == 3
            assert loads.complete(snapshot("http://b")).retractions == 0

    asyncio.run(play())
