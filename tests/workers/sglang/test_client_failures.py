"""What becomes of calls that go wrong: again, elsewhere or a dead letter."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from client_lane import CAPTURE, GENERATE, GOOD, Lane, play
from client_stage import (
    Handler,
    answer,
    cut,
    hang,
    in_turn,
    raw,
    recorded,
    refuse,
    reply_to,
    reset,
    staged,
    until,
)

from storage.sample import Stage as At
from workers.broker.messages import Capture, Failed, Generate, Responded, decode, encode
from workers.sglang.client import SGLangClient
from workers.sglang.outcomes import OUTCOMES, Outcome, ServerAwayError

ABORT = {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None}}


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (reset, "server.broke"),
        (cut, "server.broke"),
        (refuse(500, {"error": "boom"}), "server.error"),
        (refuse(400, recorded("final-refused-duplicate")["body"]), "server.duplicate_rid"),
        (raw(b'{"text": "half'), "reply.garbage"),
        (raw(b"[]"), "reply.garbage"),
        (raw(b'{"text": 1, "output_ids": ["a"], "meta_info": {}}'), "reply.garbage"),
        (answer(id="another"), "reply.garbage"),
        (answer(**ABORT), "reply.aborted"),
        (answer(finish_reason={"type": "odd"}), "reply.garbage"),
        (answer(finish_reason=None), "reply.garbage"),
        (answer(completion_tokens=4), "reply.counts"),
        (answer(prompt_tokens=9), "reply.counts"),
        (answer(6), "reply.counts"),
        (raw(b""), "reply.garbage"),
    ],
)
def test_a_bad_reply_is_tried_again_under_fresh_names_and_three_make_a_dead_letter(
    tmp_path: Path, bad: Handler, code: str
) -> None:
    async def once(lane: Lane) -> None:
        lane.stage.generate = in_turn(bad, GOOD)
        result = await lane.execute(GENERATE)
        assert isinstance(result, Responded)
        assert result.response.attempt == 2
        first, second = lane.stage.bodies
        assert first["rid"] != second["rid"]
        assert len(first["rid"]) == len(second["rid"]) == 32
        assert "extra_key" in second, "a failed attempt does not trust the cache"

    async def always(lane: Lane) -> None:
        lane.stage.generate = bad
        result = await lane.execute(GENERATE)
        assert isinstance(result, Failed)
        failure = result.failure
        assert (failure.code, failure.attempts, failure.stage) == (code, 3, At.GENERATE)
        assert (failure.digest, failure.capture, failure.dataset) == (None, None, "B1")
        assert failure.message
        assert len(lane.stage.bodies) == 3

    play(tmp_path, once)
    play(tmp_path, always)


def test_output_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    async def strange(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        content = reply_to(body)
        content["output_ids"][-1] = 2000
        return web.json_response(content)

    async def negative(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        content = reply_to(body)
        content["output_ids"][-1] = -1
        return web.json_response(content)

    async def scene(lane: Lane) -> None:
        codes = []
        for handler in (strange, negative):
            lane.stage.generate = handler
            result = await lane.execute(GENERATE)
            assert isinstance(result, Failed)
            codes.append(result.failure.code)
        assert codes == ["reply.tokens", "reply.garbage"]

    play(tmp_path, scene)


@pytest.mark.parametrize("name", ["refused-context", "refused-input", "refused-json", "refused-unknown"])
def test_what_an_unchanged_server_refuses_is_a_dead_letter_at_once(tmp_path: Path, name: str) -> None:
    body = recorded(f"final-{name}")["body"]

    async def scene(lane: Lane) -> None:
        result = await lane.execute(GENERATE)
        assert isinstance(result, Failed)
        assert (result.failure.code, result.failure.attempts) == ("server.refused", 1)
        assert len(lane.stage.bodies) == 1
        said = body["error"] if isinstance(body.get("error"), str) else body.get("error", body)
        said = said if isinstance(said, str) else said["message"]
        assert said.split()[0] in result.failure.message

    play(tmp_path, scene, generate=refuse(400, body))


def test_a_server_restarted_without_states_makes_no_dead_letters(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        lane.stage.infos["/server_info"] = recorded("off-server_info")["body"]
        with pytest.raises(ServerAwayError) as caught:
            await lane.execute(CAPTURE)
        assert caught.value.code == "server.changed"

    play(tmp_path, scene, generate=refuse(400, recorded("off-refused-states")["body"]))


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [
        (401, "no", "server.key"),
        (403, "no", "server.key"),
        (404, "no", "server.not_found"),
        (502, "bad gateway", "server.gateway"),
        (500, "call_upstream_connection_failed", "server.gateway"),
    ],
)
def test_what_is_wrong_with_the_server_sends_the_order_elsewhere(
    tmp_path: Path, status: int, said: str, code: str
) -> None:
    async def scene(lane: Lane) -> None:
        with pytest.raises(ServerAwayError) as caught:
            await lane.execute(GENERATE)
        assert caught.value.code == code
        assert caught.value.in_flight == (code == "server.gateway")

    play(tmp_path, scene, generate=refuse(status, {"error": said}))


def test_a_full_queue_is_waited_for_and_counts_no_attempt(tmp_path: Path) -> None:
    full = recorded("queue-full")
    assert full["status"] == 503

    async def scene(lane: Lane) -> None:
        result = await lane.execute(GENERATE)
        assert isinstance(result, Responded)
        assert result.response.attempt == 1
        assert len(lane.stage.bodies) == 3

    busy = refuse(503, full["body"])
    aborted = answer(finish_reason={"type": "abort", "message": "timed out", "status_code": 503})
    play(tmp_path, scene, generate=in_turn(busy, aborted, GOOD))


def test_no_server_there_sends_the_order_elsewhere(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        await lane.stage.close()
        with pytest.raises(ServerAwayError) as caught:
            await lane.execute(GENERATE)
        assert (caught.value.code, caught.value.in_flight) == ("server.unreachable", False)

    play(tmp_path, scene)


def test_a_server_that_dies_in_mid_call_sends_the_order_elsewhere_and_says_it_was_running(
    tmp_path: Path,
) -> None:
    async def scene(lane: Lane) -> None:
        call = asyncio.create_task(lane.execute(GENERATE))
        await until(lambda: bool(lane.stage.bodies), "the call arrives")
        await lane.stage.close()
        with pytest.raises(ServerAwayError) as caught:
            await call
        assert (caught.value.code, caught.value.in_flight) == ("server.died", True)

    play(tmp_path, scene, generate=hang)


def test_a_port_where_something_else_than_http_answers_now_sends_the_order_elsewhere(tmp_path: Path) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"220 mail.example ESMTP ready\r\n\r\n")
        await writer.drain()
        writer.close()

    async def scene(lane: Lane) -> None:
        await lane.stage.close()
        async with await asyncio.start_server(babble, "127.0.0.1", lane.stage.port):
            with pytest.raises(ServerAwayError) as caught:
                await lane.execute(GENERATE)
            assert caught.value.code == "server.died"
            with pytest.raises(ServerAwayError):
                await lane.context.client.facts(lane.stage.url)

    play(tmp_path, scene)


def test_what_a_server_says_in_half_characters_can_still_be_a_dead_letter(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        result = await lane.execute(GENERATE)
        assert isinstance(result, Failed)
        assert decode(encode(result)) == result

    half = {"finish_reason": {"type": "abort", "message": "half \ud83d", "status_code": None}}
    play(tmp_path, scene, generate=answer(**half))


@pytest.mark.parametrize("order", [GENERATE, CAPTURE])
def test_a_cancelled_order_leaves_the_server_and_no_file(tmp_path: Path, order: Generate | Capture) -> None:
    async def half(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"text": "')
        return await hang(request, body)

    async def scene(lane: Lane) -> None:
        call = asyncio.create_task(lane.execute(order))
        await until(lambda: bool(lane.stage.bodies), "the call arrives")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(lane.stage.left.wait(), 20)
        assert lane.files() == []

    play(tmp_path, scene, generate=half)


@pytest.mark.parametrize("alive", [True, False])
def test_past_the_deadline_only_a_server_that_still_produces_tokens_is_blamed_on_the_sample(
    tmp_path: Path, alive: bool
) -> None:
    async def run() -> None:
        async with staged() as stage, SGLangClient() as client:
            stage.generate = hang
            stage.health_status = 200 if alive else 503
            await client.generate(stage.url, {"input_ids": [9], "rid": "x"}, deadline_s=0.05)

    with pytest.raises(Exception, match="no reply in") as caught:
        asyncio.run(run())
    assert getattr(caught.value, "code", "") == ("server.slow" if alive else "server.hanging")
    assert OUTCOMES["server.slow"] is Outcome.AGAIN
