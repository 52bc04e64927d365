"""The engine as a process: states in the spool, limits, keys, clients that leave, signals, pace."""

import asyncio
import json
import time
import zlib
from pathlib import Path

import httpx
import numpy as np
import pytest
from engine_process import running_engine

from storage.sample import SpoolRef
from storage.spool import Spool, spool_name
from workers.engine import tiny_model_dir
from workers.engine.llama import Llama

PROMPT = [1, 4, 205, 52, 294, 283, 79, 71, 275]
LONG = {"max_new_tokens": 30_000, "ignore_eos": True}


def body(prompt=PROMPT, *, states=None, **sampling):
    params = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True, **sampling}
    if isinstance(states, dict):
        params["custom_params"] = {"eyas": {"states": "spool", **states}}
    return {"input_ids": prompt, "sampling_params": params, "return_hidden_states": states is not None}


def ask(url, content, **options):
    return httpx.post(f"{url}/generate", json=content, timeout=60, **options)


@pytest.fixture(scope="module")
def spool_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("spool")


@pytest.fixture(scope="module")
def url(spool_folder):
    with running_engine("--spool-dir", spool_folder, "--node", "here") as engine:
        yield engine.url


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(tiny_model_dir())


def spooled(folder, answer):
    said = answer.json()["meta_info"]["eyas_states"]
    ref = SpoolRef(node=said["node"], name=said["name"], shape=tuple(said["shape"]), crc32=said["crc32"])
    return said, np.concatenate([block.copy() for block in Spool(folder, "here", 1 << 30).blocks(ref)])


def test_a_capture_puts_one_row_a_prompt_token_into_the_spool(url, spool_folder, model):
    name = spool_name(bytes(16))
    said, states = spooled(spool_folder, ask(url, body(states={"name": name}, max_new_tokens=1)))
    assert said == {
        "node": "here",
        "name": name,
        "shape": [len(PROMPT), 4, 64],
        "crc32": zlib.crc32(states.astype("<u2").tobytes()),
        "hs_indices": [2, 4, 5, 8],
        "norm": "post",
        "kv_dtype": "bfloat16",
    }
    *_, expected = model.prefill(np.array(PROMPT), (2, 4, 5, 8))
    assert np.array_equal(states, expected)


def test_a_generation_puts_a_row_for_every_token_but_the_last_into_the_spool(url, spool_folder, model):
    answer = ask(url, body(states={"name": spool_name(bytes(16))}, max_new_tokens=6))
    _, states = spooled(spool_folder, answer)
    ran = PROMPT + answer.json()["output_ids"][:-1]
    *_, expected = model.prefill(np.array(ran), (2, 4, 5, 8))
    assert np.array_equal(states, expected)
    assert "hidden_states" not in answer.json()["meta_info"]


def test_other_layers_are_given_when_asked_for(url, spool_folder, model):
    wish = {"name": spool_name(bytes(16)), "hs_indices": [1, 3]}
    said, states = spooled(spool_folder, ask(url, body(states=wish, max_new_tokens=2)))
    assert (said["hs_indices"], said["norm"]) == ([1, 3], "none")
    *_, expected = model.prefill(np.array(PROMPT), (1, 3))
    assert np.array_equal(states[: len(PROMPT)], expected)


def test_states_of_requests_that_run_together_are_those_of_requests_that_run_alone(url, spool_folder, model):
    prompts = [[7 + (11 * i + j * j) % 1900 for j in range(3 + 5 * i)] for i in range(24)]

    async def all_at_once():
        async with httpx.AsyncClient(timeout=60) as client:
            contents = [
                body(
                    p,
                    states={"name": spool_name(bytes([i] * 16)), "hs_indices": [i % 8, 8]},
                    max_new_tokens=9,
                )
                for i, p in enumerate(prompts)
            ]
            return await asyncio.gather(*(client.post(f"{url}/generate", json=c) for c in contents))

    for index, (prompt, answer) in enumerate(zip(prompts, asyncio.run(all_at_once()), strict=True)):
        _, states = spooled(spool_folder, answer)
        ran = np.array(prompt + answer.json()["output_ids"][:-1])
        *_, expected = model.prefill(ran, (index % 8, 8))
        assert np.array_equal(states, expected)


@pytest.mark.parametrize(
    "wish", [{"name": "../x"}, {"name": ""}, {"name": 5}, {"name": "x", "hs_indices": [9]}]
)
def test_a_spool_name_that_leaves_the_folder_or_a_layer_that_is_not_there_is_refused(url, wish):
    assert ask(url, body(states=wish)).status_code == 400


def test_a_full_spool_fails_the_request_and_not_the_server(tmp_path):
    with running_engine("--spool-dir", tmp_path, "--spool-max-gb", 1.5e-4) as engine:
        first, second = (
            ask(engine.url, body(list(range(7, 200)), states={"name": name}, max_new_tokens=1))
            for name in ("first", "second")
        )
        assert first.status_code == 200
        assert second.status_code == 507
        assert "holds its limit" in second.json()["message"]
        assert ask(engine.url, body()).status_code == 200
        assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_without_states_a_request_for_them_is_refused_as_by_a_stock_server():
    with running_engine("--states", "off") as engine:
        answer = ask(engine.url, body(states=True))
        assert answer.status_code == 400
        assert "--enable-return-hidden-states" in answer.json()["error"]["message"]
        assert httpx.get(f"{engine.url}/server_info").json()["enable_return_hidden_states"] is False


def test_a_json_server_ignores_the_plugins_parameters():
    with running_engine("--states", "json") as engine:
        meta = ask(engine.url, body(states={"name": "x"}, max_new_tokens=1)).json()["meta_info"]
        assert "eyas_states" not in meta
        assert len(meta["hidden_states"][0]) == len(PROMPT)
        assert "eyas" not in httpx.get(f"{engine.url}/server_info").json()


def test_the_plugins_key_says_what_can_be_captured(url):
    assert httpx.get(f"{url}/server_info").json()["eyas"] == {
        "plugin": 1,
        "node": "here",
        "hs_indices": {"eagle3": [2, 4, 5, 8], "aux": [2, 4, 5], "final": [8]},
        "hidden_size": 64,
        "num_layers": 8,
        "norm": "post",
        "kv_dtype": "bfloat16",
        "vocab_size": 2000,
    }


@pytest.mark.parametrize("bad", [-1, 2000, 2**40, 2**70])
def test_an_id_that_would_kill_a_real_server_is_refused(url, bad):
    assert ask(url, body([5, bad])).status_code == 400


def test_responses_stop_by_themselves_where_the_prompt_says(url):
    content = body([9, 8, 7], max_new_tokens=2000, ignore_eos=False, temperature=1.0)
    first, second = ask(url, content).json(), ask(url, content).json()
    assert first["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert first["output_ids"][-1] == 2
    assert 2 not in first["output_ids"][:-1]
    assert len(first["output_ids"]) == len(second["output_ids"])
    assert first["output_ids"] != second["output_ids"]


def test_a_seed_gives_the_same_response_again(url):
    content = body(max_new_tokens=40, temperature=1.0, sampling_seed=3)
    assert ask(url, content).json()["output_ids"] == ask(url, content).json()["output_ids"]


def test_a_key_is_asked_for_except_where_the_real_server_asks_for_none():
    with running_engine("--api-key", "sk-secret") as engine:
        pages = ("ready", "health", "health_generate", "server_info", "model_info", "v1/models")
        statuses = {page: httpx.get(f"{engine.url}/{page}", timeout=30).status_code for page in pages}
        assert statuses == {
            **dict.fromkeys(("ready", "health", "health_generate"), 200),
            **dict.fromkeys(("server_info", "model_info", "v1/models"), 401),
        }
        refused = ask(engine.url, body(), headers={"Authorization": "Bearer wrong"})
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        headers = {"Authorization": "Bearer sk-secret"}
        assert ask(engine.url, body(), headers=headers).status_code == 200
        # the real server leaks its key like this; what a client keeps of it is tested against it
        assert httpx.get(f"{engine.url}/server_info", headers=headers).json()["api_key"] == "sk-secret"


def eventually(condition, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_client_that_leaves_frees_its_slot():
    with running_engine("--slots", 1, "--pace-ttft-ms", 0) as engine:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{engine.url}/generate", json={**body(**LONG), "rid": "a" * 32}, timeout=0.5)
        started = time.monotonic()
        assert ask(engine.url, {**body(), "rid": "a" * 32}).status_code == 200
        assert time.monotonic() - started < 4


def test_a_long_prompt_does_not_hold_up_a_short_one_and_is_given_up_with_its_client(url):
    long = body([7 + i % 1900 for i in range(20_000)], max_new_tokens=1)

    async def both():
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            slow = asyncio.create_task(client.post("/generate", json=long))
            while not (await client.get("/v1/loads")).json()["loads"][0]["num_used_tokens"]:
                pass
            assert (await client.post("/generate", json=body())).status_code == 200
            assert not slow.done()
            slow.cancel()

    asyncio.run(both())
    eventually(lambda: not httpx.get(f"{url}/v1/loads").json()["loads"][0]["num_running_reqs"])


def test_a_client_that_leaves_leaves_no_file(tmp_path):
    with running_engine("--pace-ttft-ms", 60_000, "--spool-dir", tmp_path) as engine:

        async def leave():
            async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
                asked = asyncio.create_task(
                    client.post("/generate", json=body(states={"name": "x"}, max_new_tokens=1))
                )
                while not (tmp_path / "x").exists():
                    await asyncio.sleep(0)
                asked.cancel()

        asyncio.run(leave())
        eventually(lambda: not list(tmp_path.iterdir()))


def test_an_aborted_request_is_answered_with_what_there_is_and_leaves_no_file(tmp_path):
    with running_engine("--pace-ttft-ms", 10, "--pace-tpot-ms", 500, "--spool-dir", tmp_path) as engine:

        async def abort():
            async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
                content = {**body(max_new_tokens=400, states={"name": "x"}), "rid": "job-10"}
                asked = asyncio.create_task(client.post("/generate", json=content))
                while not asked.done():
                    # by prefix, as the real server does
                    await client.post("/abort_request", json={"rid": "job-1"})
                return await asked

        answer = asyncio.run(abort()).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) < 400
        assert "eyas_states" not in answer["meta_info"]
        assert list(tmp_path.iterdir()) == []


def test_sigterm_lets_running_requests_finish_and_says_not_ready():
    with running_engine("--pace-ttft-ms", 1500) as engine:

        async def drain():
            async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
                asked = asyncio.create_task(client.post("/generate", json=body()))
                while not (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]:
                    pass
                engine.terminate()
                while (await client.get("/ready")).status_code != 503:
                    pass
                assert (await client.get("/health")).status_code == 503
                return await asked

        assert asyncio.run(drain()).status_code == 200
        assert engine.process.wait(10) == 0


def test_pace_and_slots_are_those_of_a_server_that_slow():
    with running_engine("--slots", 2, "--pace-ttft-ms", 200, "--pace-tpot-ms", 20) as engine:

        async def four():
            async with httpx.AsyncClient(timeout=60) as client:
                contents = [body([50 + i], max_new_tokens=11) for i in range(4)]
                answers = await asyncio.gather(
                    *(client.post(f"{engine.url}/generate", json=c) for c in contents)
                )
                return [answer.json()["meta_info"] for answer in answers]

        metas = asyncio.run(four())
        took = sorted(meta["e2e_latency"] for meta in metas)
        assert all(latency >= 0.4 for latency in took)  # 200 ms and ten times 20 ms
        queued = sorted(meta["queue_time"] for meta in metas)
        assert all(waited > 0.3 for waited in queued[2:])  # for a slot of the first two
        assert queued[0] < 0.3
        assert all(meta["first_token_latency"] >= 0.2 for meta in metas)


def test_too_many_waiting_requests_are_refused_as_by_a_full_queue():
    with running_engine("--slots", 1, "--max-queued-requests", 1, "--pace-ttft-ms", 700) as engine:

        async def three():
            async with httpx.AsyncClient(timeout=60) as client:
                return await asyncio.gather(
                    *(client.post(f"{engine.url}/generate", json=body([60 + i])) for i in range(3))
                )

        answers = asyncio.run(three())
        assert sorted(answer.status_code for answer in answers) == [200, 200, 503]
        full = next(answer.json() for answer in answers if answer.status_code == 503)
        assert full["object"] == "error"
        assert (full["message"], full["code"]) == ("The request queue is full.", 503)


def test_the_hash_model_answers_many_slow_calls_at_hardly_any_cost(tmp_path):
    calls = 182
    options = ("--model", "none", "--slots", calls, "--pace-ttft-ms", 800, "--spool-dir", tmp_path)
    with running_engine(*options, "--node", "here") as engine:

        async def all_at_once():
            async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
                contents = [body([50 + i] * 300, max_new_tokens=500, ignore_eos=False) for i in range(calls)]
                return await asyncio.gather(
                    *(client.post(f"{engine.url}/generate", json=c) for c in contents)
                )

        before = engine.cpu_s()
        answers = asyncio.run(all_at_once())
        assert engine.cpu_s() - before < 1.0
        assert all(answer.status_code == 200 for answer in answers)
        assert len({json.dumps(answer.json()["output_ids"]) for answer in answers}) == calls
        again = ask(engine.url, body([50] * 300, max_new_tokens=500, ignore_eos=False))
        assert again.json()["output_ids"] == answers[0].json()["output_ids"]
        _, states = spooled(tmp_path, ask(engine.url, body(states={"name": "y"}, max_new_tokens=3)))
        assert states.shape == (len(PROMPT) + 2, 4, 64)
        sizes = (states & 0x7FFF).astype(np.uint32) << 16
        assert sizes.view(np.float32).min() >= 0.5
        assert sizes.view(np.float32).max() < 2


def test_an_address_that_is_taken_is_one_clear_error(url):
    with (
        pytest.raises(AssertionError, match=r"cannot listen on `127.0.0.1:\d+`.*\n.*\n.*--port"),
        running_engine("--port", httpx.URL(url).port),
    ):
        pass


def test_a_folder_that_is_no_model_is_one_clear_error(tmp_path):
    with (
        pytest.raises(AssertionError, match=r"ended with 3: (.*\n)*error: no `config.json`"),
        running_engine("--model", tmp_path),
    ):
        pass
