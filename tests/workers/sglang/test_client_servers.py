"""The servers of a lane: connected, left when they go, found again, and refused when they change."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from client_stage import Stage, answer, hang, recorded, refuse, rows, staged, until

from storage.run import CaptureSpec, Sampling
from storage.settings import UNQUANTIZED, Checkpoint
from workers.board.processes import ServerState
from workers.sglang.client import SGLangClient
from workers.sglang.facts import ServerFacts
from workers.sglang.outcomes import Backoff, ServerAwayError
from workers.sglang.pace import Pace
from workers.sglang.servers import ServerPool
from workers.sglang.suitability import Needs
from workers.sglang.unchanged import check_unchanged

QUICK = Pace(
    recheck_s=0.05,
    watch_s=0.05,
    advance_s=2.0,
    strike_s=0.05,
    reconnect=Backoff(first_s=0.05, longest_s=0.1),
)
FINAL = CaptureSpec(name="final", hs_indices=(8,), norm="post", hidden_size=128)
AWAY = ServerAwayError("gone", code="server.died", in_flight=True)


def needs(**changed: Any) -> Needs:
    usual = {
        "model": "tiny-llama",
        "vocab_size": 2000,
        "input_tokens": 2042,
        "capture": None,
        "checkpoint": Checkpoint(num_layers=8, auto_kv=UNQUANTIZED),
    }
    return Needs(**{**usual, **changed})


class Troupe:
    """A pool and the facts it passed on."""

    def __init__(self, client: SGLangClient, pace: Pace) -> None:
        self.seen: list[ServerFacts] = []
        self.client = client
        self.pool = ServerPool(client, on_connect=self.keep, pace=pace)

    async def keep(self, url: str, facts: ServerFacts, needs: Needs) -> None:
        if self.seen:
            check_unchanged(self.seen[0], facts, url)
        self.seen.append(facts)

    def state(self, url: str) -> ServerState:
        return {server.url: server.state for server in self.pool.snapshot()}[url]

    def reason(self, url: str) -> str:
        return {server.url: server.reason for server in self.pool.snapshot()}[url]

    async def reaches(self, stage: Stage, state: ServerState) -> None:
        def there() -> bool:
            return any(s.url == stage.url and s.state is state for s in self.pool.snapshot())

        await until(there, f"{stage.url} is {state}")


def play(
    scene: Callable[[Troupe, Stage], Awaitable[None]], flavour: str = "final", pace: Pace = QUICK
) -> None:
    async def run() -> None:
        async with staged(flavour) as stage, SGLangClient() as client:
            troupe = Troupe(client, pace)
            try:
                await scene(troupe, stage)
            finally:
                await troupe.pool.close()
            assert troupe.pool.healthy() == ()

    asyncio.run(run())


def test_a_server_takes_calls_once_its_facts_suit_and_a_token_came() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        troupe.pool.want([stage.url], needs(sampling=Sampling(temperature=0.3)))
        await troupe.reaches(stage, ServerState.UP)
        assert troupe.pool.healthy() == (stage.url,)
        assert troupe.pool.facts[stage.url] == troupe.seen[0]
        assert stage.asked[:2] == ["/server_info", "/model_info"]
        (probe,) = stage.probed
        assert probe["sampling_params"]["max_new_tokens"] == 1
        assert probe["sampling_params"]["temperature"] == 0.3
        assert stage.bodies == []

    play(scene)


def test_a_capture_server_is_probed_for_rows_of_the_right_width() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        troupe.pool.want([stage.url], needs(capture=FINAL))
        await troupe.reaches(stage, ServerState.UP)

    async def narrow(troupe: Troupe, stage: Stage) -> None:
        stage.probe = answer(states=rows(2, 1, width=64))
        troupe.pool.want([stage.url], needs(capture=FINAL))
        await troupe.reaches(stage, ServerState.UNSUITABLE)
        assert "rows of `64` values" in troupe.reason(stage.url)

    play(scene)
    play(narrow)


def test_a_server_that_is_not_there_is_away_until_it_starts() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        await stage.close()
        troupe.pool.want([stage.url], needs())
        await troupe.reaches(stage, ServerState.AWAY)
        assert "no server answers" in troupe.reason(stage.url)
        since = troupe.pool.snapshot()[0].since
        await stage.open()
        await troupe.reaches(stage, ServerState.UP)
        assert troupe.pool.snapshot()[0].since > since
        assert troupe.reason(stage.url) == ""

    play(scene)


def test_a_server_that_dies_in_a_call_is_left_and_comes_back_with_fresh_facts() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        async def die() -> None:
            raise AWAY

        troupe.pool.want([stage.url], needs())
        await troupe.reaches(stage, ServerState.UP)
        probes, asked = stage.probes, stage.asked.count("/server_info")
        with pytest.raises(ServerAwayError):
            await troupe.pool.call(stage.url, die())
        assert troupe.pool.healthy() == (), "at once, before anything else may be sent"
        await troupe.reaches(stage, ServerState.UP)
        assert stage.probes == probes + 1
        assert stage.asked.count("/server_info") > asked

    play(scene)


def test_health_routes_that_say_yes_do_not_bring_back_a_server_that_gives_no_token() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        stage.probe = refuse(503, recorded("queue-full")["body"])
        troupe.pool.want([stage.url], needs())
        await until(lambda: stage.probes >= 3, "it is probed again")
        assert troupe.state(stage.url) is ServerState.AWAY
        assert "queue is full" in troupe.reason(stage.url)
        stage.probe = answer()
        await troupe.reaches(stage, ServerState.UP)

    play(scene)


def test_a_probe_that_waits_in_the_queue_of_a_full_server_does_not_make_it_away() -> None:
    async def run() -> None:
        async with staged() as stage, SGLangClient() as client:
            stage.probe = hang
            await client.probe(stage.url, deadline_s=0.05)
            stage.health_status = 503
            with pytest.raises(ServerAwayError) as caught:
                await client.probe(stage.url, deadline_s=0.05)
            assert caught.value.code == "server.hanging"

    asyncio.run(run())


def test_a_way_of_sampling_that_a_server_refuses_costs_no_sample() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        stage.probe = refuse(400, recorded("final-refused-sampling")["body"])
        troupe.pool.want([stage.url], needs(sampling=Sampling(temperature=-1)))
        await troupe.reaches(stage, ServerState.UNSUITABLE)
        assert "temperature must be a non-negative" in troupe.reason(stage.url)

    play(scene)


def test_an_unsuitable_server_takes_no_calls_and_says_which_flag() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        troupe.pool.want([stage.url], needs(capture=FINAL))
        await troupe.reaches(stage, ServerState.UNSUITABLE)
        assert troupe.pool.healthy() == ()
        assert stage.probes == 0
        assert "--chunked-prefill-size -1" in troupe.reason(stage.url)
        stage.infos["/server_info"] = recorded("final-server_info")["body"]
        await troupe.reaches(stage, ServerState.UP)

    play(scene, flavour="chunked")


@pytest.mark.parametrize(
    ("path", "changed", "said"),
    [
        (
            "/server_info",
            {"model_path": "/models/other", "served_model_name": "other"},
            "serves `/models/other`",
        ),
        ("/server_info", {"kv_cache_dtype": "fp8_e4m3"}, "KV cache"),
        ("/model_info", {"weight_version": "step-2"}, "weights `default` → `step-2`"),
    ],
)
def test_a_server_that_changes_in_mid_run_is_stopped_though_no_call_failed(
    path: str, changed: dict[str, Any], said: str
) -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        troupe.pool.want([stage.url], needs())
        await troupe.reaches(stage, ServerState.UP)
        before = {**stage.infos}
        stage.infos[path] = stage.infos[path] | changed
        if "served_model_name" in changed:
            stage.infos["/model_info"] = stage.infos["/model_info"] | changed
        await troupe.reaches(stage, ServerState.UNSUITABLE)
        assert said in troupe.reason(stage.url)
        stage.infos = before
        await troupe.reaches(stage, ServerState.UP)

    play(scene)


def test_a_server_that_was_silent_is_looked_at_before_the_next_call_and_a_busy_one_is_not() -> None:
    """Two looks at everything are half a minute apart; what is restarted in between answers as before."""

    async def scene(troupe: Troupe, stage: Stage) -> None:
        async def reply() -> str:
            return "done"

        async def nothing() -> None:
            raise AssertionError("sent to another server than was connected")

        def looks() -> int:
            return stage.asked.count("/server_info")

        troupe.pool.want([stage.url], needs())
        await troupe.reaches(stage, ServerState.UP)
        before = looks()
        assert await troupe.pool.call(stage.url, reply()) == "done"
        assert looks() == before + 1
        running = asyncio.create_task(troupe.pool.call(stage.url, asyncio.Event().wait()))
        await until(lambda: looks() == before + 2, "it was looked at")
        await asyncio.gather(*(troupe.pool.call(stage.url, reply()) for _ in range(5)))
        assert looks() == before + 2, "the call that runs would break if it were restarted"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        await stage.close()
        right = stage.infos["/server_info"]
        stage.infos["/server_info"] = right | {"dtype": "float16"}
        await stage.open()
        assert troupe.pool.healthy() == (stage.url,), "nobody has looked yet"
        together = [troupe.pool.call(stage.url, nothing()) for _ in range(5)]
        for error in await asyncio.gather(*together, return_exceptions=True):
            assert isinstance(error, ServerAwayError)
            assert error.code == "server.changed"
            assert not error.in_flight
        await troupe.reaches(stage, ServerState.UNSUITABLE)
        assert "restart it with `--dtype auto`" in troupe.reason(stage.url)
        assert "`producer enqueue`" in troupe.reason(stage.url)
        stage.infos["/server_info"] = right
        await troupe.reaches(stage, ServerState.UP)

    play(scene, pace=replace(QUICK, watch_s=1000.0, quiet_s=0.0))


def test_a_server_that_hangs_is_left_and_its_calls_end_long_before_their_deadline() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        stage.generate = hang
        troupe.pool.want([stage.url], needs())
        await troupe.reaches(stage, ServerState.UP)

        async def wait() -> None:
            await asyncio.Event().wait()

        calls = [asyncio.create_task(troupe.pool.call(stage.url, wait())) for _ in range(3)]
        await until(lambda: troupe.pool.snapshot()[0].in_flight == 3, "calls are in flight")
        stage.health_status, stage.probe = 503, refuse(503, {})
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, ServerAwayError)
            assert (outcome.code, outcome.in_flight) == ("server.hanging", True)
        await troupe.reaches(stage, ServerState.AWAY)

    play(scene)


def test_a_server_whose_calls_all_wait_in_vain_is_suspect_at_once_and_takes_no_more() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        troupe.pool.want([stage.url], needs())
        await troupe.reaches(stage, ServerState.UP)
        over = asyncio.Event()

        async def wait() -> None:
            await over.wait()

        call = asyncio.create_task(troupe.pool.call(stage.url, wait()))
        stage.health_hangs.clear()
        await troupe.reaches(stage, ServerState.SUSPECT)
        assert troupe.pool.healthy() == ()
        assert "has produced no token for" in troupe.reason(stage.url)
        stage.health_hangs.set()
        await troupe.reaches(stage, ServerState.UP)
        assert not call.done(), "what was in flight goes on"
        over.set()
        await call

    play(scene, pace=replace(QUICK, watch_s=1000.0, silent_s=0.2, doubt_s=0.2, advance_s=60.0))


@pytest.mark.slow
def test_a_server_that_answers_nothing_at_all_is_left_without_three_looks() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        troupe.pool.want([stage.url], needs())
        await troupe.reaches(stage, ServerState.UP)
        call = asyncio.create_task(troupe.pool.call(stage.url, asyncio.Event().wait()))
        stage.health_hangs.clear()
        stage.ready_hangs.clear()
        (error,) = await asyncio.gather(call, return_exceptions=True)
        stage.health_hangs.set()
        stage.ready_hangs.set()
        assert isinstance(error, ServerAwayError)
        assert error.message == f"{stage.url} answers nothing"
        assert (error.code, error.in_flight) == ("server.hanging", True)

    play(scene, pace=replace(QUICK, watch_s=1000.0, silent_s=0.1, doubt_s=0.1, advance_s=1000.0))


def test_a_cancelled_call_is_cancelled_and_not_taken_for_a_hanging_server() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        troupe.pool.want([stage.url], needs())
        await troupe.reaches(stage, ServerState.UP)
        ended = asyncio.Event()

        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        call = asyncio.create_task(troupe.pool.call(stage.url, wait()))
        await until(lambda: troupe.pool.snapshot()[0].in_flight == 1, "the call is in flight")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ended.is_set()
        assert troupe.pool.healthy() == (stage.url,)
        assert troupe.pool.snapshot()[0].in_flight == 0

    play(scene)


def test_addresses_come_and_go_while_the_run_goes_on() -> None:
    async def scene(troupe: Troupe, first: Stage) -> None:
        async with staged() as second:
            troupe.pool.want([first.url], needs())
            await troupe.reaches(first, ServerState.UP)
            troupe.pool.want([second.url, first.url], needs())
            await until(lambda: troupe.pool.healthy() == (second.url, first.url), "both are up")
            assert first.probes == 1, "a server that stays is left alone"
            troupe.pool.want([second.url], needs())
            await until(lambda: troupe.pool.healthy() == (second.url,), "one is left")

            async def nothing() -> None:
                raise AssertionError("sent to a server that is not wanted")

            with pytest.raises(ServerAwayError):
                await troupe.pool.call(first.url, nothing())

    play(scene)


def test_what_is_asked_of_servers_may_change_while_the_run_goes_on() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        troupe.pool.want([stage.url], needs(input_tokens=4096))
        await troupe.reaches(stage, ServerState.UNSUITABLE)
        troupe.pool.want([stage.url], needs())
        await troupe.reaches(stage, ServerState.UP)
        troupe.pool.want([stage.url], needs(model="org/other"))
        await troupe.reaches(stage, ServerState.UNSUITABLE)

    play(scene, pace=Pace(reconnect=QUICK.reconnect))


def test_the_pool_is_told_and_read_from_another_thread() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        await asyncio.to_thread(troupe.pool.want, [stage.url], needs())
        await troupe.reaches(stage, ServerState.UP)
        await asyncio.to_thread(troupe.pool.mark_away, stage.url, AWAY)
        await until(lambda: stage.probes == 2, "it is probed again")
        assert await asyncio.to_thread(troupe.pool.snapshot)

    play(scene)


def test_a_server_whose_facts_cannot_be_passed_on_is_tried_until_they_can() -> None:
    async def scene(troupe: Troupe, stage: Stage) -> None:
        failures = iter([OSError("Redis is away"), OSError("still"), None])

        async def keep(url: str, facts: ServerFacts, needs: Needs) -> None:
            failure = next(failures)
            if failure is not None:
                assert troupe.pool.healthy() == ()
                raise failure

        troupe.pool = ServerPool(troupe.client, on_connect=keep, pace=QUICK)
        troupe.pool.want([stage.url], needs())
        await troupe.reaches(stage, ServerState.UP)
        assert next(failures, "all used") == "all used"

    play(scene)


def test_a_pause_doubles_to_its_longest_and_is_spread() -> None:
    backoff = Backoff(first_s=1.0, longest_s=8.0)
    for failures, whole in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 8.0), (1000, 8.0)):
        pauses = [backoff.pause_s(failures) for _ in range(50)]
        assert all(whole / 2 <= pause <= whole for pause in pauses)
        assert len(set(pauses)) > 1
