"""What servers say and are asked: replies, facts, errors, jobs for decoders, orders to the plugin."""

import copy
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hostile import (
    as_text,
    given_or_refused,
    odd_numbers,
    plain,
    spoiled,
    texts,
    values,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import EyasError
from storage.sample import Finish, Response
from storage.spool import Spool
from workers.broker.messages import (
    Responded,
    decode,
    encode,
)
from workers.plugin.facts import ModelFacts
from workers.plugin.order import read_order
from workers.sglang.checks import check_reply
from workers.sglang.decode import DecodeJob
from workers.sglang.decode import decode as decode_states
from workers.sglang.facts import ServerFacts, read_facts
from workers.sglang.http_errors import error_message, refusal
from workers.sglang.reply import read_reply

calm = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ID, DIGEST = bytes(range(16)), bytes(range(16, 32))


REPLY = {
    "text": "a",
    "output_ids": [1, 2],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "e2e_latency": 0.5,
        "weight_version": "default",
        "num_retractions": 0,
        "eyas_states": {
            "node": "n",
            "name": "f",
            "shape": [4, 1, 2],
            "crc32": 1,
            "hs_indices": [8],
            "norm": "post",
        },
    },
}


@calm
@given(content=st.one_of(spoiled(REPLY), values))
def test_a_reply(content: Any) -> None:
    reply = given_or_refused(lambda: read_reply(content))
    if reply is None:
        return
    given_or_refused(lambda: check_reply(reply, rid="r", sent_tokens=3, max_new_tokens=5, vocab_size=10))
    response = Response(
        id=ID,
        digest=DIGEST,
        dataset="d",
        tokens=reply.tokens,
        prompt_length=0,
        spans=(),
        text=reply.text,
        finish=Finish.STOP,
        cached_tokens=reply.cached_tokens,
        retractions=reply.retractions,
        timings=reply.timings,
    )
    assert plain(decode(encode(Responded(run="r", response=response)))) == plain(
        Responded(run="r", response=response)
    )
    if reply.states is not None:
        assert min(reply.states.ref.shape) > 0


STOCK = {**REPLY, "meta_info": {**REPLY["meta_info"], "hidden_states": [[[1.0, 2.0]] * 3, [3.0, 4.0]]}}
del STOCK["meta_info"]["eyas_states"]
JOB = DecodeJob(
    body="",
    name="file",
    prompt_tokens=3,
    hs_indices=(8,),
    norm="post",
    hidden_size=2,
    chunked_prefill_size=None,
)


@calm
@given(text=texts(STOCK))
def test_a_reply_with_states_in_json(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    folder = tmp_path_factory.mktemp("reply")
    (folder / "body").write_bytes(text)
    spool = Spool(folder / "spool", "n", 1 << 20)
    job = DecodeJob(**{**asdict(JOB), "hs_indices": (8,), "body": str(folder / "body")})
    reply = given_or_refused(lambda: decode_states(job, spool))
    if reply is not None:
        given_or_refused(lambda: read_reply(reply))
    left = {path.name for path in (folder / "spool").iterdir()}
    assert left <= {"file"}
    assert {path.name for path in folder.iterdir()} == {"body", "spool"}


def test_a_sound_reply_with_states_in_json(tmp_path: Any) -> None:
    (tmp_path / "body").write_bytes(as_text(STOCK))
    spool = Spool(tmp_path / "spool", "n", 1 << 20)
    job = DecodeJob(**{**asdict(JOB), "hs_indices": (8,), "body": str(tmp_path / "body")})
    reply = read_reply(decode_states(job, spool))
    # 1, 2, 3, 4 in bf16
    block = np.concatenate([block.copy() for block in spool.blocks(reply.states.ref)])
    assert block.reshape(-1).tolist() == [0x3F80, 0x4000] * 3 + [0x4040, 0x4080]


def test_a_decode_job_comes_back_equal() -> None:
    assert DecodeJob.from_line(JOB.to_line()) == JOB


@calm
@given(line=texts(json.loads(JOB.to_line())))
def test_a_decode_job(line: bytes) -> None:
    job = given_or_refused(lambda: DecodeJob.from_line(line), ValueError)
    assert job is None or isinstance(job.body, str)


INFO = {
    "model_path": "org/model",
    "version": "0.5.23",
    "context_length": 100,
    "max_req_input_len": 94,
    "chunked_prefill_size": -1,
    "enable_return_hidden_states": True,
    "return_aux_hidden_state_layer_ids": [1, 2],
    "eyas": {
        "plugin": 1,
        "node": "n",
        "hs_indices": {"final": [8]},
        "hidden_size": 8,
        "num_layers": 8,
        "norm": "post",
        "kv_dtype": "bfloat16",
        "vocab_size": 100,
    },
}


@calm
@given(
    info=st.one_of(spoiled(INFO), values),
    model=spoiled({"architectures": ["A"], "weight_version": "w"}),
    models=spoiled({"data": [{"max_model_len": 5}]}),
)
def test_a_server_s_facts(info: Any, model: Any, models: Any) -> None:
    facts = given_or_refused(lambda: read_facts(info, model, models))
    if facts is not None:
        assert len(facts.facts_id) == 32
        assert ServerFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@calm
@given(body=texts({"error": {"message": "m"}}), status=st.integers(300, 599))
def test_an_error_s_body(body: bytes, status: int) -> None:
    assert len(error_message(body)) <= 300
    assert isinstance(refusal("http://a", status, body), EyasError)
    error_message(body).encode()


MODEL = ModelFacts(aux=(2, 4, 5), hidden_size=8, num_layers=8, vocab_size=100, kv_dtype="bfloat16")
ASKED = {"eyas": {"states": "spool", "name": "file", "capture": "eagle3", "hs_indices": [2, 8]}}


@calm
@given(custom=st.one_of(spoiled(ASKED), values), n=st.one_of(st.just(1), odd_numbers), stream=st.booleans())
def test_an_order_to_the_plugin(custom: Any, n: Any, stream: bool) -> None:
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom, n=n), return_hidden_states=True, stream=stream
    )
    order = read_order(request, MODEL)
    if order is not None and order.failed is None:
        assert "/" not in order.name
        assert set(order.hs_indices) <= set(MODEL.given)


@pytest.mark.parametrize("where", ["states", "name", "hs_indices"])
def test_an_order_that_is_nested_too_deep_is_refused_and_stops_no_server(where: str) -> None:
    nested: Any = []
    for _ in range(900):
        nested = [nested]
    custom = copy.deepcopy(ASKED)
    custom["eyas"][where] = nested
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom, n=1), return_hidden_states=True, stream=False
    )
    assert read_order(request, MODEL).failed is not None
