"""What any server Eyas talks to has to keep, asked of the embedded engine and of a real SGLang alike.

The real one is the suite's own (`make test-sglang`), or one that runs elsewhere with
`--enable-return-hidden-states --chunked-prefill-size -1` and has its address in EYAS_TEST_SGLANG_URL.
Nothing here depends on the model.
"""

import json
import os
import secrets
import socket
import threading
import time

import httpx
import pytest
from engine_process import running_engine

from tests.sglang.flavours import FINAL

PROMPT = [31, 44, 205, 52, 94, 83, 79, 71, 75, 61, 99]


@pytest.fixture(scope="module", params=["engine", pytest.param("sglang", marks=pytest.mark.sglang)])
def server(request):
    """A client of one server."""
    if request.param == "engine":
        with (
            running_engine("--states", "json", "--context-length", 2048) as engine,
            httpx.Client(base_url=engine.url, timeout=60) as client,
        ):
            yield client
        return
    url = os.environ.get("EYAS_TEST_SGLANG_URL") or request.getfixturevalue("servers").get(FINAL).url
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def info(server):
    return server.get("/server_info").json()


def body(prompt=PROMPT, *, states=False, rid=None, **sampling):
    return {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True, **sampling},
        "return_hidden_states": states,
        "rid": rid or secrets.token_hex(16),
        "extra_key": secrets.token_hex(8),
    }


def ask(server, content):
    answer = server.post("/generate", json=content)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_reply_carries_ids_counts_and_the_requests_own_id(server):
    rid = secrets.token_hex(16)
    reply = ask(server, body(rid=rid))
    meta = reply["meta_info"]
    assert meta["id"] == rid
    assert len(reply["output_ids"]) == meta["completion_tokens"] == 6
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["cached_tokens"] == 0
    assert meta["num_retractions"] == 0
    assert meta["e2e_latency"] > 0
    assert isinstance(reply["text"], str)


def test_greedy_is_the_same_twice(server):
    assert ask(server, body())["output_ids"] == ask(server, body())["output_ids"]


def test_the_stop_token_is_in_the_ids_and_named_as_the_reason(server):
    third = ask(server, body())["output_ids"][2]
    reply = ask(server, body(ignore_eos=False, stop_token_ids=[third]))
    assert reply["output_ids"][-1] == third
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}


def test_a_capture_returns_one_row_a_prompt_token(server):
    entries = ask(server, body(states=True, max_new_tokens=1))["meta_info"]["hidden_states"]
    assert len(entries) == 1
    assert len(entries[0]) == len(PROMPT)
    assert len({len(row) for row in entries[0]}) == 1


def test_a_generation_returns_a_row_for_every_token_but_the_last(server):
    entries = ask(server, body(states=True, max_new_tokens=4))["meta_info"]["hidden_states"]
    width = len(entries[0][0])
    assert [len(entries[0]), *(len(row) for row in entries[1:])] == [len(PROMPT), width, width, width]


def test_rows_of_generated_tokens_are_those_of_the_same_tokens_read(server):
    reply = ask(server, body(states=True, max_new_tokens=4))
    generated = reply["meta_info"]["hidden_states"][1:]
    whole = PROMPT + reply["output_ids"]
    [rows] = ask(server, body(whole, states=True, max_new_tokens=1))["meta_info"]["hidden_states"]
    assert len(rows) == len(whole)
    for row, same in zip(generated, rows[len(PROMPT) :], strict=False):
        dot = sum(a * b for a, b in zip(row, same, strict=True))
        size = (sum(a * a for a in row) * sum(b * b for b in same)) ** 0.5
        assert dot / size > 0.999


def test_no_token_means_no_states(server):
    reply = ask(server, body(states=True, max_new_tokens=0))
    assert reply["output_ids"] == []
    assert reply["meta_info"]["hidden_states"] == []


def test_states_that_were_not_asked_for_are_not_sent(server):
    assert "hidden_states" not in ask(server, body())["meta_info"]


def test_unknown_keys_are_ignored_at_the_top_and_refused_in_sampling(server):
    assert ask(server, {**body(), "no_such_key": 1})["output_ids"]
    answer = server.post("/generate", json=body(no_such_key=1))
    assert answer.status_code == 400
    assert "no_such_key" in answer.json()["error"]


def test_custom_parameters_are_accepted(server):
    eyas = {"states": "spool", "name": "x", "capture": "eagle3", "hs_indices": [2, 4, 5, 8]}
    assert ask(server, body(custom_params={"eyas": eyas}))["output_ids"]


def test_limits_of_length_are_those_announced(server, info):
    context, limit = info["context_length"], info["max_req_input_len"]
    assert limit == context - 6
    for count, new_tokens in ((context, 1), (limit, 1), (10, context)):
        answer = server.post(
            "/generate", json=body([40 + i % 50 for i in range(count)], max_new_tokens=new_tokens)
        )
        assert answer.status_code == 400
        assert "message" in answer.json()["error"]
    reply = ask(server, body([40 + i % 50 for i in range(limit - 1)], max_new_tokens=None))
    assert len(reply["output_ids"]) == context - 2 - (limit - 1)


@pytest.mark.parametrize(
    "content",
    [
        body([]),
        body("text"),
        body(["a"]),
        body(temperature=-1),
        body(top_p=0),
        body(max_new_tokens=-1),
        {"sampling_params": {}},
        [],
    ],
)
def test_a_bad_request_is_a_400_with_a_message(server, content):
    answer = server.post("/generate", json=content)
    assert answer.status_code == 400
    said = answer.json()
    message = said["error"] if "error" in said else said["message"]
    assert message["message"] if isinstance(message, dict) else message


def test_an_id_in_flight_is_refused_and_free_again_after_its_client_left(server):
    rid = secrets.token_hex(16)
    content = json.dumps(body(rid=rid, max_new_tokens=1900)).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: here\r\nContent-Length: {len(content)}\r\n"

    def again():
        return server.post("/generate", json=body(rid=rid, max_new_tokens=1)).status_code

    with socket.create_connection((server.base_url.host, server.base_url.port)) as client:
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        deadline = time.monotonic() + 20
        while not server.get("/v1/loads").json()["loads"][0]["num_running_reqs"]:
            assert time.monotonic() < deadline
        assert again() == 400
    deadline = time.monotonic() + 20
    while again() != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_aborting_answers_with_what_there_is(server):
    rid = secrets.token_hex(16)
    answers = []

    def generate():
        answers.append(server.post("/generate", json=body(rid=rid, max_new_tokens=1900)))

    thread = threading.Thread(target=generate)
    thread.start()
    while thread.is_alive():
        assert server.post("/abort_request", json={"rid": rid}).status_code == 200
        thread.join(0.01)
    assert answers[0].status_code == 200
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answers[0].json()["output_ids"]) < 1900


def test_requests_at_once_get_the_greedy_tokens_they_get_alone(server):
    prompts = [[50 + i, 60 + i, *PROMPT[i:]] for i in range(6)]
    alone = [ask(server, body(prompt, max_new_tokens=1))["output_ids"] for prompt in prompts]
    together: dict[int, list[int]] = {}

    def one(index):
        together[index] = ask(server, body(prompts[index], max_new_tokens=1))["output_ids"]

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(len(prompts))] == alone


def test_the_server_says_what_it_is(server, info):
    models = server.get("/v1/models").json()["data"]
    assert models[0]["max_model_len"] == info["context_length"]
    model = server.get("/model_info").json()
    assert model["model_path"] == info["model_path"]
    assert model["tokenizer_path"] == info["tokenizer_path"]
    assert {"weight_version", "architectures", "is_generation"} <= set(model)
    assert info["status"] == "ready"
    assert info["enable_return_hidden_states"] is True
    assert {"dtype", "quantization", "kv_cache_dtype", "chunked_prefill_size", "disable_radix_cache"} <= set(
        info
    )


@pytest.mark.parametrize("page", ["/ready", "/health", "/health_generate"])
def test_a_server_that_answers_is_healthy(server, page):
    assert server.get(page).status_code == 200


def test_the_load_can_be_asked_for(server):
    [load] = server.get("/v1/loads").json()["loads"]
    assert load["num_running_reqs"] >= 0
    assert load["num_waiting_reqs"] >= 0


def logprobs_of(server, prompt, start, **more):
    asked = {"return_logprob": True, "logprob_start_len": start, **more}
    return ask(server, {**body(prompt, max_new_tokens=1), **asked})["meta_info"]["input_token_logprobs"]


@pytest.mark.parametrize("start", [0, 4, len(PROMPT) - 1, len(PROMPT), -1])
def test_logprobs_name_the_tokens_from_the_place_asked_and_say_nothing_of_the_first(server, start):
    said = logprobs_of(server, PROMPT, start)
    assert [entry[1] for entry in said] == ([] if start == -1 else PROMPT[start:])
    assert [entry[0] is None for entry in said] == [at == 0 for at in range(len(said))]
    assert all(entry[0] < 0 for entry in said[1:])


def test_a_place_behind_the_prompt_is_refused(server):
    answer = server.post(
        "/generate", json={**body(), "return_logprob": True, "logprob_start_len": len(PROMPT) + 1}
    )
    assert answer.status_code == 400


def test_logprobs_are_those_of_the_tokens_generated_whatever_the_temperature_of_the_asking(server):
    reply = ask(server, {**body(), "return_logprob": True})
    generated = reply["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in generated] == reply["output_ids"]
    whole = PROMPT + reply["output_ids"]
    for temperature in (0, 0.5):
        asked = body(whole, max_new_tokens=1, temperature=temperature)
        asked |= {"return_logprob": True, "logprob_start_len": len(PROMPT) - 1}
        read = ask(server, asked)["meta_info"]["input_token_logprobs"]
        assert [entry[0] for entry in read[1:]] == pytest.approx([entry[0] for entry in generated], abs=0.1)


def test_logprobs_and_states_come_of_one_call(server):
    asked = {"return_logprob": True, "logprob_start_len": 3}
    meta = ask(server, {**body(states=True, max_new_tokens=1), **asked})["meta_info"]
    assert len(meta["hidden_states"][0]) == len(PROMPT)
    assert len(meta["input_token_logprobs"]) == len(PROMPT) - 3
