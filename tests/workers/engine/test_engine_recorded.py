"""The engine's answers against those recorded from a real SGLang with the same model: `record_replies.py`."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_process import running_engine

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, CONTEXT
from record_replies import duplicate, send

RECORDED = json.loads((Path(__file__).parent / "recorded" / "sglang.json").read_bytes())
RECORDED_AUX = json.loads((Path(__file__).parent / "recorded" / "sglang_aux.json").read_bytes())
BY_NAME = {case.name: case for case in CASES}
GENERATED = [
    name
    for name, answer in RECORDED.items()
    if isinstance(answer["body"], dict) and "output_ids" in answer["body"]
]
REFUSED = [name for name, answer in RECORDED.items() if answer["status"] >= 400 and name in BY_NAME]
UNCLEAR = {"seeded", "top k and top p", "defaults", "clamped length", "longest input", "text", "text and ids"}
"""Sampled, or greedy after a prompt whose tokens do not win clearly: other tokens are no less right."""
WORDED_ALIKE = [name for name in REFUSED if "object" not in RECORDED[name]["body"]]
"""Refusals whose very text the client may meet; the rest name the real server's classes."""


@pytest.fixture(scope="module")
def url():
    with running_engine("--states", "json", "--mean-tokens", 0, "--context-length", CONTEXT) as engine:
        yield engine.url


def test_every_case_was_recorded():
    assert set(BY_NAME) <= set(RECORDED)


@pytest.mark.parametrize("name", GENERATED)
def test_a_reply_has_the_fields_types_and_counts_of_the_real_one(url, name):
    expected = RECORDED[name]["body"]
    answer = send(url, BY_NAME[name])
    assert answer["status"] == 200
    assert answer["type"] == "application/json"
    body = answer["body"]
    assert list(body) == list(expected)
    if name not in UNCLEAR:
        assert (body["text"], body["output_ids"]) == (expected["text"], expected["output_ids"])
    else:
        assert len(body["output_ids"]) == len(expected["output_ids"])
    meta, expected_meta = body["meta_info"], expected["meta_info"]
    cached = {"cached_tokens", "cached_tokens_details", "hidden_states"}
    assert set(meta) == set(expected_meta)
    for key in set(meta) - cached:
        assert meta[key] == expected_meta[key], key


@pytest.mark.parametrize("name", ["states of a generation", "states of a capture", "states of no token"])
def test_states_have_the_rows_and_directions_of_the_real_ones(url, name):
    assert_same_states(send(url, BY_NAME[name]), RECORDED[name])


@pytest.mark.parametrize("name", ["states of a generation", "states of a capture"])
def test_auxiliary_states_replace_the_final_one_as_on_the_real_server(name):
    with running_engine("--states", "json", "--aux", "--mean-tokens", 0) as engine:
        assert_same_states(send(engine.url, BY_NAME[name]), RECORDED_AUX[name])


def assert_same_states(answer, expected):
    entries = answer["body"]["meta_info"]["hidden_states"]
    expected_entries = expected["body"]["meta_info"]["hidden_states"]
    assert len(entries) == len(expected_entries)
    for entry, expected_entry in zip(entries, expected_entries, strict=True):
        rows, expected_rows = np.array(entry), np.array(expected_entry)
        assert rows.shape == expected_rows.shape
        cosines = (rows * expected_rows).sum(-1)
        cosines /= np.linalg.norm(rows, axis=-1) * np.linalg.norm(expected_rows, axis=-1)
        assert cosines.min() > 0.999


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_has_the_status_and_shape_of_the_real_one(url, name):
    answer, expected = send(url, BY_NAME[name]), RECORDED[name]
    assert answer["status"] == expected["status"]
    assert shape(answer["body"]) == shape(expected["body"])


@pytest.mark.parametrize("name", WORDED_ALIKE)
def test_a_refusal_says_what_the_real_one_says(url, name):
    assert send(url, BY_NAME[name])["body"] == RECORDED[name]["body"]


def shape(body):
    if isinstance(body, dict):
        return {key: shape(value) for key, value in body.items()}
    return type(body).__name__


def test_a_second_request_of_the_same_id_is_refused(url):
    assert duplicate(url) == RECORDED["duplicate rid"]


@pytest.mark.parametrize("name", ["models", "ready", "health", "health by a token"])
def test_small_pages_are_those_of_the_real_server(url, name):
    assert send(url, BY_NAME[name]) == RECORDED[name]


@pytest.mark.parametrize("name", ["model info", "older model info"])
def test_model_info_says_what_the_real_one_says(url, name):
    body, expected = send(url, BY_NAME[name])["body"], RECORDED[name]["body"]
    assert body == {key: expected[key] for key in body}


@pytest.mark.parametrize("name", ["server info", "older server info"])
def test_server_info_has_every_field_of_the_real_one_that_was_kept(url, name):
    body, expected = send(url, BY_NAME[name])["body"], RECORDED[name]["body"]
    assert set(body) == set(expected)
    same = {
        *("api_key", "quantization", "context_length", "max_req_input_len", "chunked_prefill_size"),
        *("speculative_algorithm", "status", "enable_return_hidden_states", "return_hidden_states_mode"),
        *(
            "enable_return_aux_hidden_states",
            "return_aux_hidden_state_layer_ids",
            "version",
            "dp_size",
            "pp_size",
        ),
    }
    assert {key: body[key] for key in same} == {key: expected[key] for key in same}


def test_server_info_of_an_auxiliary_server_says_so_as_the_real_one_does():
    expected = RECORDED_AUX["server info"]["body"]
    with running_engine("--states", "json", "--aux") as engine:
        body = send(engine.url, BY_NAME["server info"])["body"]
    same = ("enable_return_aux_hidden_states", "aux_hidden_state_capture", "return_hidden_states_mode")
    assert {key: body[key] for key in same} == {key: expected[key] for key in same}
    assert body["speculative_algorithm"] == expected["speculative_algorithm"]


def test_a_stream_sends_the_tokens_so_far_with_every_token(url):
    events = stream_events(send(url, BY_NAME["stream"])["body"])
    expected = stream_events(RECORDED["stream"]["body"])
    assert [event["output_ids"] for event in events] == [event["output_ids"] for event in expected]
    assert [event["meta_info"]["finish_reason"] for event in events] == [
        event["meta_info"]["finish_reason"] for event in expected
    ]


def stream_events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_load_is_told_in_the_real_ones_fields(url):
    load, expected = send(url, BY_NAME["loads"])["body"]["loads"], RECORDED["loads"]["body"]["loads"]
    assert set(load[0]) <= set(expected[0])
