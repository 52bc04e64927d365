"""One order from message to result, against a real HTTP server that answers and misbehaves."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from client_stage import (
    Handler,
    Stage,
    answer,
    cut,
    hang,
    in_turn,
    raw,
    recorded,
    refuse,
    reply_to,
    reset,
    rows,
    staged,
    until,
)
from test_client_facts import PLUGIN

from storage.errors import FullError
from storage.run import CaptureSpec, Run, RunSpec, Sampling, StatesMode
from storage.sample import Finish, Kind, Span
from storage.sample import Stage as At
from storage.settings import RunSettings
from storage.spool import Spool
from storage.tokens import as_tokens, response_digest
from workers.attempt import Context
from workers.decoding import DecodePool
from workers.execute import execute
from workers.facts import read_facts
from workers.messages import Capture, Captured, Failed, Generate, Responded, Result, decode, encode
from workers.outcomes import OUTCOMES, Backoff, Outcome, ServerAwayError, StaleOrderError
from workers.runs import RunView
from workers.sglang import SGLangClient

FINAL = CaptureSpec(name="final", hs_indices=(8,), norm="post", hidden_size=128)
PROMPT = as_tokens(range(20, 30))
GENERATE = Generate(
    run="r",
    id=b"i" * 16,
    dataset="B1",
    lane="short",
    prompt=PROMPT,
    spans=(Span(start=0, end=10, turn=0, kind=Kind.USER),),
    max_new_tokens=5,
)
CAPTURE = Capture(
    run="r",
    id=b"i" * 16,
    digest=b"d" * 16,
    dataset="B1",
    tokens=as_tokens(range(20, 40)),
    prompt_length=10,
    capture="final",
)
GOOD = answer()


def view(states: StatesMode = StatesMode.REPLAY, **changed: Any) -> RunView:
    spec = RunSpec(
        model="tiny-llama",
        tokenizer_digest="t",
        template_digest="t",
        vocab_size=2000,
        sampling=Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=3),
        short_max_tokens=100,
        long_max_tokens=200,
        states=states,
        capture=FINAL,
    )
    usual = {
        "server_urls": (),
        "capture_urls": (),
        "concurrency": {},
        "max_input_tokens": 2042,
        "states": states,
        "capture": FINAL,
    }
    return RunView(
        run=Run(id="r", spec=spec), settings=RunSettings(**{**usual, **changed}), output_dir="/out"
    )


class Lane:
    """A client, a spool and decoders, connected to one stage."""

    def __init__(self, stage: Stage, client: SGLangClient, spool: Spool, seen: RunView) -> None:
        self.stage, self.spool = stage, spool
        infos = stage.infos
        facts = read_facts(infos["/server_info"], infos["/model_info"], infos["/v1/models"])
        quick = Backoff(first_s=0.01, longest_s=0.01)
        self.context = Context(
            client=client,
            spool=spool,
            decoders=DecodePool(spool, processes=1),
            view=seen,
            facts={stage.url: facts},
            again=quick,
            busy=quick,
        )

    async def execute(self, order: Generate | Capture) -> Result:
        result = await execute(order, self.stage.url, self.context)
        assert decode(encode(result)).run == "r", "a result travels"
        return result

    def files(self) -> list[str]:
        return [path.name for path in self.spool.folder.iterdir()]


def play(
    tmp_path: Path,
    scene: Callable[[Lane], Awaitable[None]],
    *,
    generate: Handler = GOOD,
    seen: RunView | None = None,
    flavour: str = "final",
    plugin: bool = False,
    max_bytes: int = 1 << 30,
) -> None:
    """The scene, on a stage whose server answers calls as `generate` does."""

    async def run() -> None:
        async with staged(flavour) as stage, SGLangClient() as client:
            stage.generate = generate
            if plugin:
                stage.infos["/server_info"]["eyas"] = PLUGIN | {"node": "here"}
            lane = Lane(stage, client, Spool(tmp_path / "spool", "here", max_bytes), seen or view())
            try:
                await scene(lane)
            finally:
                await lane.context.decoders.close()

    asyncio.run(run())


def test_a_prompt_becomes_a_response_of_the_ids_sent_and_the_ids_returned(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        result = await lane.execute(GENERATE)
        assert isinstance(result, Responded)
        response = result.response
        assert response.tokens.tolist() == [*range(20, 30), 5, 6, 7, 8, 9]
        assert response.digest == response_digest(response.tokens)
        assert (response.prompt_length, response.finish, response.attempt) == (10, Finish.LENGTH, 1)
        assert response.spans[1:] == (Span(start=10, end=15, turn=1, kind=Kind.GENERATED),)
        assert response.facts_id == lane.context.facts_of(lane.stage.url).facts_id
        assert response.timings.e2e_s > 0
        assert result.states is None
        (body,) = lane.stage.bodies
        assert body["input_ids"] == list(range(20, 30))
        assert "extra_key" not in body, "prompts share their prefixes"
        assert body["return_hidden_states"] is False
        sampling = body["sampling_params"]
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.7, 0.9, 40)
        assert sampling["max_new_tokens"] == 5

    play(tmp_path, scene)


def test_output_is_capped_so_that_the_whole_can_be_captured(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        result = await lane.execute(GENERATE)
        assert isinstance(result, Responded)
        assert len(result.response.tokens) < 14

    play(tmp_path, scene, seen=view(max_input_tokens=14))


def test_a_known_sequence_is_captured_with_a_row_for_every_token(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Captured)
        states = result.states
        assert (states.digest, states.capture, states.hs_indices, states.norm) == (
            b"d" * 16,
            "final",
            (8,),
            "post",
        )
        assert states.spool.shape == (20, 1, 128)
        assert lane.files() == [states.spool.name]
        assert lane.spool.check_values(states.spool).ok
        (body,) = lane.stage.bodies
        assert body["sampling_params"]["max_new_tokens"] == 1
        assert body["return_hidden_states"] is True

    play(tmp_path, scene)


def test_inline_states_come_with_the_response_less_the_last_row(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        result = await lane.execute(GENERATE)
        assert isinstance(result, Responded)
        assert result.states is not None
        assert result.states.digest == result.response.digest
        assert result.states.spool.shape == (10 + 5 - 1, 1, 128)
        assert "extra_key" in lane.stage.bodies[0]

    play(tmp_path, scene, seen=view(StatesMode.INLINE))


def spooling(spool: Spool, **changed: Any) -> Handler:
    """A server with the plugin, on this machine."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked = body["sampling_params"]["custom_params"]["eyas"]
        prompt, new = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        states = changed.get("states", np.full((prompt + new - 1, 1, 128), 0x3F80, np.uint16))
        ref = spool.write(asked["name"], states)
        said = {
            "node": ref.node,
            "name": ref.name,
            "shape": ref.shape,
            "crc32": ref.crc32,
            "hs_indices": asked["hs_indices"],
            "norm": "post",
            "kv_dtype": "bfloat16",
        } | changed.get("said", {})
        content = reply_to(body | {"return_hidden_states": False}, eyas_states=said)
        if changed.get("lose"):
            spool.delete(ref)
        return web.json_response(content)

    return handle


def test_states_in_the_spool_are_taken_as_they_lie(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        lane.stage.generate = spooling(lane.spool)
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Captured)
        data = np.full((20, 1, 128), 0x3F80, np.uint16).tobytes()
        assert result.states.spool.crc32 == zlib.crc32(data)
        assert result.states.spool.node == "here"
        assert lane.files() == [result.states.spool.name]

    play(tmp_path, scene, plugin=True)


ZEROS = np.full((20, 1, 128), 0x3F80, np.uint16)
ZEROS[4] = 0
NAN = np.full((20, 1, 128), 0x3F80, np.uint16)
NAN[4, 0, 7] = 0x7FC0
SHORT = np.full((19, 1, 128), 0x3F80, np.uint16)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"states": ZEROS}, "states.zero"),
        ({"states": NAN}, "states.not_finite"),
        ({"states": SHORT}, "states.short"),
        ({"said": {"crc32": 1}}, "states.lost"),
        ({"lose": True}, "states.lost"),
        ({"said": {"hs_indices": [7]}}, "states.layers"),
        ({"said": {"norm": "pre"}}, "states.layers"),
        ({"said": {"shape": [20, 2, 64]}}, "states.shape"),
        ({"said": {"name": "another"}}, "states.missing"),
        ({"said": {"error": "plugin.failed", "message": "why"}}, "states.missing"),
        ({"said": {"shape": "nonsense"}}, "reply.garbage"),
    ],
)
def test_spooled_states_that_are_not_what_was_asked_are_a_dead_letter_and_no_file(
    tmp_path: Path, changed: dict[str, Any], code: str
) -> None:
    async def scene(lane: Lane) -> None:
        lane.stage.generate = spooling(lane.spool, **changed)
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Failed)
        assert (result.failure.code, result.failure.attempts) == (code, 3)
        assert (result.failure.stage, result.failure.digest) == (At.CAPTURE, b"d" * 16)
        assert lane.files() == []

    play(tmp_path, scene, plugin=True)


def test_a_full_spool_on_either_side_is_no_fault_of_the_sample(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        with pytest.raises(FullError):
            await lane.execute(CAPTURE)

    play(tmp_path, scene, max_bytes=100)
    full = answer(eyas_states={"error": "spool.full", "message": "64 GB"})
    play(tmp_path, scene, generate=full, plugin=True)
    play(tmp_path, scene, generate=refuse(507, {"error": "no room"}), plugin=True)
    assert list((tmp_path / "spool").iterdir()) == []


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


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (lambda prompt, new: rows(prompt - 3, new), "states.short"),
        (lambda prompt, new: [[[0.0] * 128] * prompt], "states.zero"),
        (lambda prompt, new: [[[float("nan")] * 128] * prompt], "states.not_finite"),
        (lambda prompt, new: rows(prompt, new, width=64), "states.shape"),
        (lambda prompt, new: [], "states.short"),
    ],
)
def test_bad_states_of_a_stock_server_end_as_a_dead_letter_and_no_file(
    tmp_path: Path, states: Any, code: str
) -> None:
    async def scene(lane: Lane) -> None:
        lane.stage.generate = answer(states=states)
        result = await lane.execute(CAPTURE)
        assert isinstance(result, Failed)
        assert (result.failure.code, result.failure.attempts, result.failure.capture) == (code, 3, "final")
        assert lane.files() == []
        assert len({body["extra_key"] for body in lane.stage.bodies}) == 3

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


@pytest.mark.parametrize("bad", [-1, 2000, 2_000_000])
def test_an_id_outside_the_vocabulary_is_never_sent(tmp_path: Path, bad: int) -> None:
    tokens = np.array([5, bad], np.int32)

    async def scene(lane: Lane) -> None:
        for order in (
            Generate(**{n: getattr(GENERATE, n) for n in Generate.__slots__} | {"prompt": tokens}),
            Capture(**{n: getattr(CAPTURE, n) for n in Capture.__slots__} | {"tokens": tokens}),
        ):
            result = await execute(order, lane.stage.url, lane.context)
            assert isinstance(result, Failed)
            assert result.failure.code == "prompt.tokens"
        assert lane.stage.bodies == []

    play(tmp_path, scene)


def test_a_sequence_longer_than_the_server_takes_is_never_sent(tmp_path: Path) -> None:
    long = np.full(2042, 5, np.int32)

    async def scene(lane: Lane) -> None:
        capture = Capture(**{n: getattr(CAPTURE, n) for n in Capture.__slots__} | {"tokens": long})
        generate = Generate(**{n: getattr(GENERATE, n) for n in Generate.__slots__} | {"prompt": long[1:]})
        for order in (capture, generate):
            result = await lane.execute(order)
            assert isinstance(result, Failed)
            assert result.failure.code == "prompt.long"
        assert lane.stage.bodies == []

    play(tmp_path, scene)


def test_an_order_for_a_capture_the_run_no_longer_wants_is_stale(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        with pytest.raises(StaleOrderError):
            await lane.execute(CAPTURE)

    other = CaptureSpec(name="aux", hs_indices=(2, 4, 5), norm="none", hidden_size=128)
    play(tmp_path, scene, seen=view(capture=other))
    play(tmp_path, scene, seen=view(capture=None))


def test_the_same_prompt_asks_with_the_same_seed_and_another_with_another(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        other = Generate(**{n: getattr(GENERATE, n) for n in Generate.__slots__} | {"id": b"j" * 16})
        for order in (GENERATE, GENERATE, other):
            await lane.execute(order)
        first, again, another = (body["sampling_params"]["sampling_seed"] for body in lane.stage.bodies)
        assert first == again != another
        assert all(0 <= seed < 2**31 for seed in (first, another))

    play(tmp_path, scene)


def test_a_hundred_and_fifty_calls_are_in_flight_at_once(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        everybody = asyncio.Event()

        async def gather(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if len(lane.stage.bodies) >= 150:
                everybody.set()
            await everybody.wait()
            return web.json_response(reply_to(body))

        lane.stage.generate = gather
        async with asyncio.timeout(30):
            results = await asyncio.gather(*(lane.execute(GENERATE) for _ in range(150)))
        assert all(isinstance(result, Responded) for result in results)

    play(tmp_path, scene)
