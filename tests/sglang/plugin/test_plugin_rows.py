"""The plugin in a server that chunks, mixes, retracts, caches and writes over rows: none is lost or wrong."""

import contextlib
import secrets
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from asking import LAYERS, NODE, Asker, body, prompts
from serving import AUX, EAGLE3, SPOOL_GB, check_rows, serve

from workers.sglang.facts import read_facts

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def chunking(environment, tmp_path_factory):
    """It chunks, mixes, retracts, caches, and writes over each batch's rows before they are processed."""
    folder = tmp_path_factory.mktemp("chunking")
    with serve(
        environment,
        folder,
        *AUX,
        *("--chunked-prefill-size", "64", "--enable-mixed-chunk"),
        *("--max-total-tokens", "1200", "--schedule-conservativeness", "0.05"),
        environ={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"},
        spoiled=True,
    ) as server:
        yield Asker(server.url, folder / "spool")


def test_a_prompt_in_five_chunks_has_a_row_for_every_token(chunking, environment, tmp_path):
    answers = [chunking.ask(prompt) for prompt in prompts(2, 300, 310)]
    assert check_rows(chunking, answers, environment, tmp_path) >= 600


def test_auxiliary_layers_and_the_final_state_come_together_as_the_protocol_says(chunking):
    answer = chunking.ask(prompts(1, 40, 40)[0], 5)
    said = answer.said
    assert {key: said[key] for key in ("node", "shape", "hs_indices", "norm", "kv_dtype")} == {
        "node": NODE,
        "shape": [44, 4, 128],
        "hs_indices": EAGLE3,
        "norm": "post",
        "kv_dtype": "bfloat16",
    }
    assert "hidden_states" not in answer.meta
    chunking.rows(said)


def test_rows_are_taken_before_anything_writes_over_them(chunking, environment, tmp_path):
    prompt = prompts(1, 50, 50, seed=7)[0]
    stock = chunking.ask(prompt, sampling={"custom_params": None})
    assert np.unique(stock.meta["hidden_states"][0]).tolist() == [12352.0]  # what the spoiler left, in bf16
    check_rows(chunking, [chunking.ask(prompt)], environment, tmp_path)


def test_many_at_once_that_chunk_mix_and_are_retracted_have_all_their_rows(chunking, environment, tmp_path):
    answers = chunking.ask_all(prompts(24, 20, 200, seed=1), 100, at_once=12)
    assert sum(answer.meta["num_retractions"] for answer in answers) > 3
    assert check_rows(chunking, answers, environment, tmp_path) > 3000


def test_rows_that_came_from_the_prefix_cache_are_an_error_not_a_short_file(chunking):
    prompt = prompts(1, 100, 100, seed=2)[0]
    first = chunking.ask(prompt, fresh=False)
    chunking.rows(first.said)
    second = chunking.ask([*prompt, 11, 12], fresh=False)
    assert second.meta["cached_tokens"] >= 90
    assert second.said["error"] == "states.short"
    assert "prefix cache" in second.said["message"]
    assert chunking.files() == []


def test_requests_that_do_not_ask_are_served_as_ever_beside_those_that_do(chunking):
    prompt = prompts(1, 60, 60, seed=3)[0]
    quiet = {"return_hidden_states": False, "sampling": {"custom_params": None}}
    alone = chunking.ask(prompt, 20, **quiet)
    assert "eyas_states" not in alone.meta
    assert "hidden_states" not in alone.meta
    asking = chunking.ask(prompt, 20)
    assert asking.content["output_ids"] == alone.content["output_ids"]
    chunking.rows(asking.said)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"eyas": {"hs_indices": [1, 8]}}, "this server gives [2, 4, 5, 8]"),
        ({"eyas": {"name": "../up"}}, "folder's name"),
        ({"eyas": {"states": "mail"}}, "mail"),
    ],
)
def test_what_cannot_be_done_is_said_in_the_reply(chunking, given, word):
    answer = chunking.ask([11, 12, 13], **given)
    assert word in answer.said["message"]
    assert chunking.files() == []


def test_a_full_spool_fails_the_request_and_room_makes_the_next_one_succeed(chunking):
    chunking.spool.folder.mkdir(exist_ok=True)
    blocker = chunking.spool.folder / "blocker"
    with blocker.open("wb") as file:
        file.truncate(int(SPOOL_GB * 1e9))
    assert chunking.ask([11, 12, 13]).said["error"] == "spool.full"
    blocker.unlink()
    chunking.rows(chunking.ask([11, 12, 13]).said)


def test_a_spool_folder_that_was_taken_away_costs_nothing(chunking):
    shutil.rmtree(chunking.spool.folder)
    chunking.rows(chunking.ask([11, 12, 13]).said)


def test_an_aborted_request_leaves_no_file(chunking):
    rid = secrets.token_hex(16)
    with httpx.Client(base_url=chunking.url, timeout=60) as client:
        with contextlib.suppress(httpx.ReadTimeout):  # the client leaves
            client.post("/generate", json=body([11, 12, 13], 900, rid=rid), timeout=0.5)
        client.post("/abort_request", json={"rid": rid})
        until(lambda: client.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0)
    chunking.rows(chunking.ask([11, 12, 13]).said)
    assert chunking.files() == []


def test_requests_whose_clients_leave_while_they_are_retracted_leave_no_file(chunking):
    rids = [secrets.token_hex(16) for _ in range(12)]
    with httpx.Client(base_url=chunking.url, timeout=60) as client:
        with ThreadPoolExecutor(len(rids)) as pool:  # more than its memory is for: some wait, half written

            def leave(rid):
                with contextlib.suppress(httpx.ReadTimeout):
                    asked = body(prompts(1, 100, 150)[0], 800, rid=rid)
                    httpx.post(f"{chunking.url}/generate", json=asked, timeout=6)

            list(pool.map(leave, rids))
        for rid in rids:
            client.post("/abort_request", json={"rid": rid})
        until(lambda: client.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0)
    assert chunking.files() == []
    chunking.rows(chunking.ask([11, 12, 13]).said)


def test_the_facts_are_those_the_client_reads(chunking):
    with httpx.Client(base_url=chunking.url) as client:
        answers = [client.get(path).json() for path in ("/server_info", "/model_info", "/v1/models")]
    plugin = read_facts(*answers).plugin
    assert plugin is not None
    assert plugin.hs_indices == {"eagle3": (2, 4, 5, 8), "aux": (2, 4, 5), "final": (8,)}
    assert (plugin.num_layers, plugin.hidden_size) == (LAYERS, 128)
    assert (plugin.node, plugin.norm, plugin.kv_dtype) == (NODE, "post", "bfloat16")


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
