"""States of a server whose spool is not this process's: fetched over HTTP, or left to a sink that lives."""

import asyncio
import json
import threading
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from client_lane import CAPTURE, Lane, play, view
from client_stage import Handler, Stage, answer, hang, in_turn, refuse, reply_to, staged, until
from test_client_facts import PLUGIN

from storage.errors import FullError, UnsuitableError
from storage.run import CaptureSpec
from storage.spool import Spool
from storage.spool_file import HEADER_BYTES, SpoolWriter, header
from tests.engine_process import running_engine
from workers.broker.messages import Captured, Failed
from workers.sglang.attempt import Context
from workers.sglang.client import SGLangClient
from workers.sglang.decoding import DecodePool
from workers.sglang.execute import execute
from workers.sglang.outcomes import Backoff, ServerAwayError
from workers.sglang.passing import Passing
from workers.sglang.spool_probe import probe_spool

GOOD = (np.arange(20 * 128, dtype=np.uint16).reshape(20, 1, 128) % 1000) + 0x3F00
NAN = GOOD.copy()
NAN[4, 0, 7] = 0x7FC0
NOW = Backoff(first_s=0.01, longest_s=0.01)


def on_engine(
    tmp_path: Path,
    scene: Callable[[Any, Context, CaptureSpec], Awaitable[None]],
    *,
    node: str = "there",
    api_key: str | None = None,
) -> None:
    """The scene, with a lane of node `here` and an engine that writes to a folder of its own."""

    async def run(url: str) -> None:
        spool = Spool(tmp_path / "ours", "here", 1 << 30)
        async with SGLangClient(api_key) as client:
            facts = await client.facts(url)
            assert facts.plugin is not None
            plugin = facts.plugin
            indices = plugin.hs_indices["final"]
            capture = CaptureSpec(
                name="final", hs_indices=indices, norm="post", hidden_size=plugin.hidden_size
            )
            decoders = DecodePool(spool, processes=1)
            context = Context(
                client=client,
                spool=spool,
                decoders=decoders,
                view=view(capture=capture),
                facts={url: facts},
                again=NOW,
                passing=Passing(),
            )
            try:
                await scene(url, context, capture)
            finally:
                await decoders.close()

    key = ("--api-key", api_key) if api_key else ()
    with running_engine("--spool-dir", tmp_path / "theirs", "--node", node, *key) as engine:
        asyncio.run(run(engine.url))


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def rows_in_json(url: str) -> np.ndarray:
    """What the same server says of the order's tokens in a stock reply, uint16 [T, 1, H]."""
    asked = {
        "input_ids": CAPTURE.tokens.tolist(),
        "sampling_params": {"max_new_tokens": 1},
        "return_hidden_states": True,
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(asked).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        (block,) = json.loads(reply.read())["meta_info"]["hidden_states"]
    return (np.array(block, np.float32).view(np.uint32) >> 16).astype(np.uint16)[:, None]


def test_states_of_another_node_are_fetched_bit_for_bit_and_freed_there(tmp_path: Path) -> None:
    async def scene(url: str, context: Context, capture: CaptureSpec) -> None:
        result = await execute(CAPTURE, url, context)
        assert isinstance(result, Captured)
        ref = result.states.spool
        assert ref.node == "here"
        assert names(tmp_path / "ours") == [ref.name]
        assert names(tmp_path / "theirs") == []
        (found,) = context.spool.blocks(ref)
        assert (found == await asyncio.to_thread(rows_in_json, url)).all()

    on_engine(tmp_path, scene)


def test_states_are_left_where_they_lie_while_a_sink_of_that_node_lives(tmp_path: Path) -> None:
    async def scene(url: str, context: Context, capture: CaptureSpec) -> None:
        context.passing.sinks = frozenset({"here", "there"})
        result = await execute(CAPTURE, url, context)
        assert isinstance(result, Captured)
        assert result.states.spool.node == "there"
        assert names(tmp_path / "theirs") == [result.states.spool.name]
        context.passing.sinks = frozenset({"here"})
        result = await execute(CAPTURE, url, context)
        assert isinstance(result, Captured)
        assert result.states.spool.node == "here"

    on_engine(tmp_path, scene)


def test_another_folder_of_the_same_node_is_found_out_and_fetched_from(tmp_path: Path) -> None:
    async def scene(url: str, context: Context, capture: CaptureSpec) -> None:
        with pytest.raises(ServerAwayError) as caught:
            await execute(CAPTURE, url, context)
        assert caught.value.code == "server.other_spool"
        facts = context.facts_of(url)
        await probe_spool(context.client, url, facts, capture, context.spool, context.passing)
        assert names(tmp_path / "ours") == []
        result = await execute(CAPTURE, url, context)
        assert isinstance(result, Captured)
        assert names(tmp_path / "ours") == [result.states.spool.name]

    on_engine(tmp_path, scene, node="here")


def test_a_shared_folder_is_found_out_again_when_a_server_comes_back_with_it(tmp_path: Path) -> None:
    async def scene(url: str, context: Context, capture: CaptureSpec) -> None:
        context.passing.found(url, apart=True)
        (tmp_path / "theirs").rmdir()
        (tmp_path / "theirs").symlink_to(tmp_path / "ours")
        facts = context.facts_of(url)
        await probe_spool(context.client, url, facts, capture, context.spool, context.passing)
        result = await execute(CAPTURE, url, context)
        assert isinstance(result, Captured)
        assert names(tmp_path / "ours") == [result.states.spool.name]
        assert context.passing.way(url, "here", "here") == "folder"

    on_engine(tmp_path, scene, node="here")


def test_the_key_is_asked_for_before_a_file_as_before_generate(tmp_path: Path) -> None:
    async def scene(url: str, context: Context, capture: CaptureSpec) -> None:
        assert isinstance(await execute(CAPTURE, url, context), Captured)
        async with SGLangClient("wrong") as client:
            context.spool.write("left", GOOD)
            (tmp_path / "ours" / "left").rename(tmp_path / "theirs" / "left")
            for method in ("GET", "DELETE"):
                with pytest.raises(Exception, match="Unauthorized"):
                    async with client.stream(method, url, "/eyas/spool/left", deadline_s=10):
                        pass
        assert names(tmp_path / "theirs") == ["left"]

    on_engine(tmp_path, scene, api_key="right")


class There:
    """A stage whose server writes to another node's spool and hands out what is told."""

    def __init__(self, stage: Stage, folder: Path, states: np.ndarray = GOOD) -> None:
        self.spool = Spool(folder, "there", 1 << 30)
        self.states = states
        self.deleted: list[str] = []
        self.sent = asyncio.Event()
        """Set when half of a file went out."""
        self.get: Handler = self.whole
        stage.generate, stage.spooled = self.generate, self.answer

    async def generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked = body["sampling_params"]["custom_params"]["eyas"]
        ref = self.spool.write(asked["name"], self.states)
        said = {"node": ref.node, "name": ref.name, "shape": ref.shape, "crc32": ref.crc32}
        said |= {"hs_indices": asked["hs_indices"], "norm": "post", "kv_dtype": "bfloat16"}
        return web.json_response(reply_to(body | {"return_hidden_states": False}, eyas_states=said))

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.method == "DELETE":
            self.deleted.append(request.match_info["name"])
            (self.spool.folder / request.match_info["name"]).unlink(missing_ok=True)
            return web.Response(status=204)
        return await self.get(request, body)

    def data(self, request: web.Request) -> bytes:
        return (self.spool.folder / request.match_info["name"]).read_bytes()

    async def whole(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=self.data(request))

    def changed(self, change: Callable[[bytes], bytes]) -> Handler:
        async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.Response(body=change(self.data(request)))

        return handle

    async def half(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Half of the file, and no more for now."""
        data = self.data(request)
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        self.sent.set()
        return await hang(request, body)

    async def cut(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Half of the file, and the connection breaks."""
        data = self.data(request)
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        assert request.transport is not None
        request.transport.abort()
        return response


def with_there(
    tmp_path: Path,
    scene: Callable[[Lane, There], Awaitable[None]],
    *,
    states: np.ndarray = GOOD,
    max_bytes: int = 1 << 30,
) -> None:
    async def run(lane: Lane) -> None:
        there = There(lane.stage, tmp_path / "theirs", states)
        await scene(lane, there)
        assert names(tmp_path / "theirs") == []

    play(tmp_path, run, plugin="there", max_bytes=max_bytes)


@pytest.mark.parametrize("times", [1, 2])
def test_a_connection_that_breaks_in_mid_copy_is_made_again_without_another_capture(
    tmp_path: Path, times: int
) -> None:
    async def scene(lane: Lane, there: There) -> None:
        there.get = in_turn(*[there.cut] * times, there.whole)
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Captured)
        assert lane.files() == [result.states.spool.name]
        assert (np.concatenate(list(lane.spool.blocks(result.states.spool))) == GOOD).all()
        assert len(lane.stage.bodies) == 1

    with_there(tmp_path, scene)


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "a flipped bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "another tensor": lambda data: header((10, 2, 128), 7) + data[HEADER_BYTES:],
    "no spool file": lambda data: b"<html>" * (len(data) // 6 + 1),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_bytes_that_are_not_the_files_are_never_taken(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    async def scene(lane: Lane, there: There) -> None:
        there.get = there.changed(change)
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Failed)
        assert (result.failure.code, result.failure.attempts) == ("states.lost", 3)
        assert lane.files() == []

    with_there(tmp_path, scene)


def test_a_file_that_is_gone_is_captured_again(tmp_path: Path) -> None:
    async def scene(lane: Lane, there: There) -> None:
        gone = refuse(410, {"error": "spool file is not there"})
        there.get = in_turn(gone, gone, gone, there.whole)
        assert isinstance(await lane.execute(CAPTURE), Captured)
        assert len(lane.stage.bodies) == 2

    with_there(tmp_path, scene)


def test_values_that_no_forward_pass_gives_are_refused_on_their_way(tmp_path: Path) -> None:
    async def scene(lane: Lane, there: There) -> None:
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Failed)
        assert (result.failure.code, result.failure.attempts) == ("states.not_finite", 3)
        assert lane.files() == []
        assert len(there.deleted) == 3

    with_there(tmp_path, scene, states=NAN)


@pytest.mark.parametrize(
    ("handler", "code"),
    [
        (refuse(404, {"detail": "Not Found"}), "server.other_spool"),
        (refuse(405, {"detail": "Method Not Allowed"}), "server.other_spool"),
        (refuse(401, {"error": "Unauthorized"}), "server.key"),
        (refuse(502, {}), "server.gateway"),
    ],
)
def test_a_server_that_hands_out_nothing_is_away_and_no_sample_is_at_fault(
    tmp_path: Path, handler: Handler, code: str
) -> None:
    async def scene(lane: Lane, there: There) -> None:
        there.get = handler
        with pytest.raises(ServerAwayError) as caught:
            await lane.execute(CAPTURE)
        assert caught.value.code == code
        assert lane.files() == []
        for left in there.spool.folder.iterdir():  # nobody can delete it from here: the server's sweep does
            left.unlink()

    with_there(tmp_path, scene)


def test_a_server_whose_states_cannot_come_in_any_way_is_unsuitable_before_its_first_call(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with staged() as stage, SGLangClient() as client:
            stage.infos["/server_info"]["eyas"] = PLUGIN | {"node": "there"}
            there = There(stage, tmp_path / "theirs", GOOD[:2])
            stage.probe, stage.spooled = there.generate, refuse(404, {"detail": "Not Found"})
            facts = await client.facts(stage.url)
            capture = CaptureSpec(name="final", hs_indices=(8,), norm="post", hidden_size=128)
            spool, passing = Spool(tmp_path / "ours", "here", 1 << 30), Passing()
            with pytest.raises(UnsuitableError) as caught:
                await probe_spool(client, stage.url, facts, capture, spool, passing)
            assert caught.value.code == "server.other_spool"
            assert "EYAS_NODE=there" in str(caught.value.hint)
            passing.sinks = frozenset({"there"})
            await probe_spool(client, stage.url, facts, capture, spool, passing)

    asyncio.run(run())


def test_a_rank_that_writes_on_a_machine_of_its_own_needs_a_sink_there(tmp_path: Path) -> None:
    async def scene(lane: Lane, there: There) -> None:
        there.spool = Spool(tmp_path / "theirs", "third", 1 << 30)
        with pytest.raises(ServerAwayError, match="node `third`"):
            await lane.execute(CAPTURE)
        lane.context.passing.sinks = frozenset({"third"})
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Captured)
        assert result.states.spool.node == "third"
        for left in there.spool.folder.iterdir():
            left.unlink()

    with_there(tmp_path, scene)


def test_a_full_spool_here_stops_the_copy_and_the_file_there_is_freed(tmp_path: Path) -> None:
    async def scene(lane: Lane, there: There) -> None:
        lane.spool.write("waiting", GOOD[:2])  # for a sink
        with pytest.raises(FullError):
            await lane.execute(CAPTURE)
        assert lane.files() == ["waiting"]
        assert len(there.deleted) == 1

    with_there(tmp_path, scene, max_bytes=6000)


def test_a_spool_that_is_wiped_in_mid_copy_is_this_machines_fault_and_no_samples(tmp_path: Path) -> None:
    async def scene(lane: Lane, there: There) -> None:
        whole = there.whole

        async def wiped(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            rmtree(lane.spool.folder)
            return await whole(request, body)

        there.get = wiped
        with pytest.raises(OSError, match="No such file"):
            await lane.execute(CAPTURE)
        lane.spool.folder.mkdir()

    with_there(tmp_path, scene)


def test_a_server_that_dies_in_mid_copy_is_away_and_nothing_stays_here(tmp_path: Path) -> None:
    async def scene(lane: Lane, there: There) -> None:
        there.get = there.half
        running = asyncio.ensure_future(lane.execute(CAPTURE))
        await there.sent.wait()
        await lane.stage.close()
        with pytest.raises(ServerAwayError) as caught:
            await running
        assert caught.value.code == "server.died"
        assert lane.files() == []
        for left in there.spool.folder.iterdir():
            left.unlink()

    with_there(tmp_path, scene)


@pytest.mark.parametrize("when", ["while it computes", "while it is copied"])
def test_a_cancelled_call_leaves_no_file_on_either_side(tmp_path: Path, when: str) -> None:
    async def scene(lane: Lane, there: There) -> None:
        there.get = there.half
        if when == "while it computes":
            lane.stage.generate = hang
        running = asyncio.ensure_future(lane.execute(CAPTURE))
        if when == "while it computes":
            await until(lambda: bool(lane.stage.bodies), "the request to arrive")
        else:
            await there.sent.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        (body,) = lane.stage.bodies
        assert there.deleted == [body["sampling_params"]["custom_params"]["eyas"]["name"]]
        assert lane.files() == []

    with_there(tmp_path, scene)


def test_a_call_cancelled_while_its_file_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Spool.writer
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(spool: Spool, *args: Any) -> SpoolWriter:
        if spool.node == "there":
            return make(spool, *args)
        begun.set()
        assert go_on.wait(30)
        try:
            return make(spool, *args)
        finally:
            ended.set()

    async def scene(lane: Lane, there: There) -> None:
        monkeypatch.setattr(Spool, "writer", slow)
        running = asyncio.ensure_future(lane.execute(CAPTURE))
        await until(begun.is_set, "the thread to be there")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        go_on.set()
        await until(ended.is_set, "the thread to end")
        await until(lambda: not lane.files(), "nothing to be left")

    with_there(tmp_path, scene)


def test_states_that_nobody_may_store_are_not_left_to_another_nodes_sink(tmp_path: Path) -> None:
    async def scene(lane: Lane, there: There) -> None:
        lane.context.passing.sinks = frozenset({"there"})
        there.states = GOOD[:19]
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Failed)
        assert result.failure.code == "states.short"

    with_there(tmp_path, scene)


def test_a_call_that_the_server_refuses_is_no_reason_to_wait_for_its_spool(tmp_path: Path) -> None:
    async def scene(lane: Lane, there: There) -> None:
        lane.stage.generate = answer(eyas_states={"error": "spool.full", "message": "64 GB"})
        with pytest.raises(FullError):
            await lane.execute(CAPTURE)

    with_there(tmp_path, scene)
