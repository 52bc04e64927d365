"""Which samples are checked, what is asked for it, and that no sample is lost or kept waiting by it."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from client_lane import CAPTURE, GENERATE, Lane, play, view
from client_stage import Handler, answer, refuse, reply_to, rows
from engine_process import running_engine

from storage.run import CaptureSpec, StatesMode
from storage.sample import Check, States
from storage.spool import Spool
from workers.broker.messages import Capture, Captured, Responded, decode, encode
from workers.sglang.attempt import Context
from workers.sglang.audit.auditor import FIRST_TRIES, POSITIONS, Auditor
from workers.sglang.client import SGLangClient
from workers.sglang.decoding import DecodePool
from workers.sglang.execute import execute
from workers.sglang.passing import Passing

T = len(CAPTURE.tokens)


def with_logprobs(
    value: float = -2.0, *, shifted: int = 0, states: Callable[[int, int], Any] | None = None
) -> Handler:
    """A server that also says log-probabilities when it is asked for them."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        meta: dict[str, Any] = {}
        second = body.get("return_logprob")
        if second:
            start = body["logprob_start_len"]
            ids = [token + shifted for token in body["input_ids"][start:]]
            meta["input_token_logprobs"] = [[value if at else None, one, None] for at, one in enumerate(ids)]
        return web.json_response(reply_to(body, states=states if second else None, **meta))

    return handle


def play_audited(
    tmp_path: Path, scene: Callable[[Lane], Awaitable[None]], every: int = 1, **stage: Any
) -> None:
    """As `play`, on a lane that checks one sample in `every`."""

    async def audited(lane: Lane) -> None:
        lane.context = replace(lane.context, auditor=Auditor())
        await scene(lane)

    seen = view(stage.pop("states", StatesMode.REPLAY), check_every=every)
    play(tmp_path, audited, seen=seen, **stage)


async def captured(lane: Lane, order: Capture = CAPTURE) -> States:
    result = await lane.execute(order)
    assert isinstance(result, Captured)
    arrived = decode(encode(result))
    assert isinstance(arrived, Captured)
    assert arrived.states == result.states, "the check travels with its states"
    return result.states


def check_of(states: States) -> Check:
    assert states.check is not None
    return states.check


def numbered(number: int) -> Capture:
    return replace(CAPTURE, digest=hashlib.blake2b(bytes([number]), digest_size=16).digest())


def test_a_chosen_sample_is_captured_a_second_time_with_its_last_tokens_logprobs(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        states = await captured(lane)
        check = check_of(states)
        assert (check.server, check.rows, check.worst_error) == (lane.stage.url, T, 0.0)
        assert (check.positions, check.mean_logprob) == (T - 1, -2.0)
        assert check.alarms == ()
        assert any("`tiny-llama`" in reason for reason in check.skipped), "no checkpoint here, and it says so"
        assert lane.files() == [states.spool.name], "the second capture leaves no file"
        first, second = lane.stage.bodies
        assert "return_logprob" not in first
        assert (second["return_logprob"], second["logprob_start_len"]) == (True, 0)
        assert second["input_ids"] == first["input_ids"]
        assert second["sampling_params"]["max_new_tokens"] == 1
        for name in ("rid", "extra_key"):
            assert first[name] != second[name]

    play_audited(tmp_path, scene, generate=with_logprobs())


def test_an_id_that_sglang_hides_behind_a_0_is_no_other_token(tmp_path: Path) -> None:
    good = with_logprobs()

    async def hides(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answered = await good(request, body)
        assert isinstance(answered, web.Response)
        content = json.loads(answered.text or "")
        for entry in content["meta_info"].get("input_token_logprobs", ())[5:6]:
            entry[1] = 0
        return web.json_response(content)

    async def scene(lane: Lane) -> None:
        assert check_of(await captured(lane)).positions == T - 1

    play_audited(tmp_path, scene, generate=hides)


def test_of_a_long_sample_the_last_tokens_alone_are_asked_for(tmp_path: Path) -> None:
    long = replace(CAPTURE, tokens=CAPTURE.tokens.repeat(10))

    async def scene(lane: Lane) -> None:
        check = check_of(await captured(lane, long))
        assert check.positions == POSITIONS
        assert lane.stage.bodies[1]["logprob_start_len"] == len(long.tokens) - 1 - POSITIONS

    play_audited(tmp_path, scene, generate=with_logprobs())


def test_a_sample_of_one_token_has_no_logprobs_to_ask_for(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        check = check_of(await captured(lane, replace(CAPTURE, tokens=CAPTURE.tokens[:1])))
        assert (check.rows, check.positions) == (1, 0)

    play_audited(tmp_path, scene, generate=with_logprobs())


def test_a_response_with_its_states_is_checked_too(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        result = await lane.execute(GENERATE)
        assert isinstance(result, Responded)
        assert result.states is not None
        check = check_of(result.states)
        assert check.rows == result.states.spool.shape[0] == len(result.response.tokens) - 1
        assert lane.stage.bodies[1]["input_ids"] == result.response.tokens.tolist()
        assert lane.files() == [result.states.spool.name]

    play_audited(tmp_path, scene, generate=with_logprobs(), states=StatesMode.INLINE)


def test_rows_that_differ_are_an_alarm_on_a_sample_that_is_kept(tmp_path: Path) -> None:
    def other(prompt: int, new: int) -> Any:
        block, *rest = rows(prompt, new)
        return [[*block[:5], [-value for value in block[5]], *block[6:]], *rest]

    async def scene(lane: Lane) -> None:
        states = await captured(lane)
        (alarm,) = check_of(states).alarms
        assert (alarm.code, alarm.value) == ("states.row", pytest.approx(2.0))
        assert lane.spool.check_values(states.spool).ok

    play_audited(tmp_path, scene, generate=with_logprobs(states=other))


def test_one_in_so_many_is_chosen_and_always_the_same_ones() -> None:
    digests = [hashlib.blake2b(bytes([i, j]), digest_size=16).digest() for i in range(40) for j in range(250)]
    chosen = []
    for _ in range(2):
        auditor, server = Auditor(), ("run", "http://a", "facts", "final")
        assert auditor.chooses(bytes([1]) * 16, server, 500), "the first of a server"
        chosen.append([digest for digest in digests if auditor.chooses(digest, server, 500)])
    assert chosen[0] == chosen[1]
    assert 5 <= len(chosen[0]) <= 45, "20 of 10 000"
    assert not any(Auditor().chooses(digest, server, 0) for digest in digests)


def test_the_first_of_each_server_is_chosen_once(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        checks = [(await captured(lane, numbered(number))).check for number in range(6)]
        assert [check is not None for check in checks] == [True] + [False] * 5
        assert len(lane.stage.bodies) == 7

    play_audited(tmp_path, scene, 1 << 60, generate=with_logprobs())


def test_no_check_is_made_when_none_is_wanted(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        assert (await captured(lane)).check is None
        assert len(lane.stage.bodies) == 1

    play_audited(tmp_path, scene, 0, generate=with_logprobs())


def once_good(then: Handler) -> Handler:
    """The first capture is good; the second is answered otherwise."""
    good = with_logprobs()

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (then if body.get("return_logprob") else good)(request, body)

    return handle


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (refuse(400, {"error": {"message": "no"}}), "server.refused"),
        (refuse(503, {"object": "error", "message": "The request queue is full.", "code": 503}), "busy"),
        (answer(finish_reason={"type": "abort", "message": "no"}), "reply.aborted"),
        (answer(finish_reason={"type": "abort", "message": "full", "status_code": 507}), "spool.full"),
        (answer(states=lambda prompt, new: rows(prompt - 1, new)), "states.short"),
        (with_logprobs(shifted=1), "reply.garbage"),
    ],
)
def test_a_second_capture_that_fails_is_noted_and_the_sample_kept(
    tmp_path: Path, then: Handler, why: str
) -> None:
    async def scene(lane: Lane) -> None:
        states = await captured(lane)
        check = check_of(states)
        assert any(why in reason for reason in check.skipped), check
        assert (check.rows, check.alarms) == (0, ())
        assert lane.files() == [states.spool.name]
        assert len(lane.stage.bodies) == 2, "it is not tried again"

    play_audited(tmp_path, scene, generate=once_good(then))


def test_figures_that_cannot_be_judged_cost_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **figures: Any) -> Check:
        raise ZeroDivisionError

    monkeypatch.setattr("workers.sglang.audit.auditor.judged", fail)

    async def scene(lane: Lane) -> None:
        states = await captured(lane)
        assert states.check is None
        assert lane.files() == [states.spool.name]

    play_audited(tmp_path, scene, generate=with_logprobs())


def test_a_server_that_says_no_logprobs_is_compared_all_the_same(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        check = check_of(await captured(lane))
        assert (check.rows, check.positions) == (T, 0)
        assert "log-probabilities: the server does not say them" in check.skipped

    play_audited(tmp_path, scene, generate=answer())


def test_a_server_whose_first_samples_cannot_be_checked_is_not_asked_for_ever(tmp_path: Path) -> None:
    async def scene(lane: Lane) -> None:
        for number in range(8):
            await captured(lane, numbered(number))
        assert len(lane.stage.bodies) == 8 + FIRST_TRIES

    refused = refuse(400, {"error": {"message": "no"}})
    play_audited(tmp_path, scene, 1 << 60, generate=once_good(refused))


def test_a_lane_that_ends_in_the_middle_of_a_check_leaves_no_file(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def scene(lane: Lane) -> None:
        task = asyncio.create_task(lane.execute(CAPTURE))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert lane.files() == []

    play_audited(tmp_path, scene, generate=once_good(hang))


def test_states_that_stay_on_their_servers_machine_are_fetched_for_the_check_alone(tmp_path: Path) -> None:
    async def run(url: str) -> None:
        async with SGLangClient() as client:
            facts = await client.facts(url)
            assert facts.plugin is not None
            capture = CaptureSpec(
                name="eagle3",
                hs_indices=facts.plugin.hs_indices["eagle3"],
                norm="post",
                hidden_size=facts.plugin.hidden_size,
            )
            seen = view(check_every=1, capture=capture)
            # a name that means nothing here; the server's own is the folder it loaded
            assert seen.run.spec.model == "tiny-llama"
            spool, passing = Spool(tmp_path / "here", "here", 1 << 30), Passing()
            passing.sinks = frozenset({"there"})
            context = Context(
                client=client,
                spool=spool,
                decoders=DecodePool(spool),
                view=seen,
                facts={url: facts},
                passing=passing,
                auditor=Auditor(),
            )
            order = replace(CAPTURE, capture="eagle3", tokens=CAPTURE.tokens.repeat(3))
            result = await execute(order, url, context)
        assert isinstance(result, Captured)
        assert result.states.spool.node == "there"
        check = check_of(result.states)
        assert (check.rows, check.worst_error) == (3 * T, 0.0)
        # made-up ids, of no text that this model has seen
        assert {alarm.code for alarm in check.alarms} == {"tokens.unlikely"}
        assert check.head_error is not None
        assert check.head_error < 0.05
        assert [path.name for path in (tmp_path / "there").iterdir()] == [result.states.spool.name]
        assert list((tmp_path / "here").iterdir()) == []

    with running_engine("--spool-dir", tmp_path / "there", "--node", "there") as engine:
        asyncio.run(run(engine.url))
