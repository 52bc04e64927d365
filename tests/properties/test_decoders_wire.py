"""Every decoder of what comes over a connection: messages, replies, facts, orders, records in Redis."""

import contextlib
import copy
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from hostile import (
    as_text,
    deep,
    given_or_refused,
    odd_numbers,
    odd_texts,
    spoiled,
    spoiled_bytes,
    texts,
    values,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from storage.errors import EyasError
from storage.run import CaptureSpec, Run, RunSpec, Sampling, StatesMode
from storage.sample import Failure, Finish, Kind, Response, Span, SpoolRef, Stage, States, Timings
from storage.settings import DatasetSettings, RunSettings
from storage.spool import Spool
from storage.tokens import as_tokens
from workers.board.board import (
    Board,
    DatasetBoard,
    LaneBoard,
    Rates,
    ServerBoard,
    SinkBoard,
    read_board,
)
from workers.board.processes import ProcessSnapshot, ServerSnapshot, ServerState, read_processes
from workers.broker.keys import BOARD, RUN, SETTINGS, process_key
from workers.broker.message_fields import MAX_TOKENS
from workers.broker.messages import (
    Capture,
    Captured,
    Failed,
    Generate,
    MessageError,
    Responded,
    decode,
    encode,
)
from workers.plugin.facts import ModelFacts
from workers.plugin.order import read_order
from workers.runs import Carried, RunView, read_carried, read_view
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

# ---- messages

counts = st.integers(0, 2**31 - 1)
names = st.text(max_size=12).filter(lambda text: text.isprintable())
token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(as_tokens)
spans = st.lists(
    st.builds(
        Span, start=counts, end=counts, turn=counts, kind=st.sampled_from(Kind), reasoning=st.booleans()
    ),
    max_size=4,
).map(tuple)
seconds = st.floats(0, 1e6)
responses = st.builds(
    Response,
    id=st.just(ID),
    digest=st.just(DIGEST),
    dataset=names,
    tokens=token_lists,
    prompt_length=counts,
    spans=spans,
    text=names,
    finish=st.sampled_from(Finish),
    cached_tokens=counts,
    retractions=counts,
    attempt=counts,
    timings=st.builds(Timings, e2e_s=seconds, queue_s=seconds, first_token_s=seconds),
    facts_id=names,
)
states = st.builds(
    States,
    id=st.just(ID),
    digest=st.just(DIGEST),
    dataset=names,
    capture=names,
    spool=st.builds(
        SpoolRef,
        node=names,
        name=names,
        shape=st.tuples(st.integers(1, 2**20), st.integers(1, 100), st.integers(1, 2**16)),
        crc32=st.integers(0, 2**32 - 1),
    ),
    facts_id=names,
    hs_indices=st.lists(counts, max_size=4).map(tuple),
    norm=names,
    check=st.none(),
)
failures = st.builds(
    Failure,
    id=st.just(ID),
    digest=st.one_of(st.none(), st.just(DIGEST)),
    capture=st.one_of(st.none(), names),
    dataset=names,
    stage=st.sampled_from(Stage),
    attempts=counts,
    code=names,
    message=names,
)
messages = st.one_of(
    st.builds(
        Generate,
        run=names,
        id=st.just(ID),
        dataset=names,
        lane=names,
        prompt=token_lists,
        spans=spans,
        max_new_tokens=counts,
    ),
    st.builds(
        Capture,
        run=names,
        id=st.just(ID),
        digest=st.just(DIGEST),
        dataset=names,
        tokens=token_lists,
        prompt_length=counts,
        capture=names,
    ),
    st.builds(Responded, run=names, response=responses, states=st.one_of(st.none(), states)),
    st.builds(Captured, run=names, states=states),
    st.builds(Failed, run=names, failure=failures),
)


def plain(value: Any) -> Any:
    """Comparable: arrays as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "__slots__"):
        return type(value).__name__, [plain(getattr(value, name)) for name in value.__slots__]
    return value


@calm
@given(message=messages)
def test_a_message_comes_back_equal(message: Any) -> None:
    assert plain(decode(encode(message))) == plain(message)


def storable(message: Any) -> None:
    """What would stop a sink or a lane that takes this message for sound."""
    match message:
        case Responded(response=found):
            assert all(isinstance(t, str) for t in (found.dataset, found.text, found.facts_id))
            np.array([found.prompt_length, found.cached_tokens, found.retractions, found.attempt], np.int32)
            np.array([(s.start, s.end, s.turn) for s in found.spans], np.int32)
            assert np.isfinite(
                [found.timings.e2e_s, found.timings.queue_s, found.timings.first_token_s]
            ).all()
        case Failed(failure=failure):
            assert all(isinstance(t, str) for t in (failure.dataset, failure.code, failure.message))
            assert isinstance(failure.capture, str | None)
            np.array([failure.attempts], np.int32)
        case Captured(states=found):
            assert all(isinstance(t, str) for t in (found.capture, found.norm, found.spool.name))
            np.array([found.spool.crc32], np.uint32)
            assert 0 < found.spool.size_bytes < 2**62
        case Generate() | Capture():
            assert isinstance(message.dataset, str)
    assert encode(message)


wire_values = st.one_of(values, st.binary(max_size=20))


@calm
@given(data=st.data(), message=messages)
def test_a_message_with_one_wrong_field(data: st.DataObject, message: Any) -> None:
    body = msgpack.unpackb(encode(message), raw=False)
    inner = body
    for _ in range(2):  # into the response, the states, their spool
        nested = [key for key, value in inner.items() if isinstance(value, dict)]
        if nested and data.draw(st.booleans()):
            inner = inner[data.draw(st.sampled_from(nested))]
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(wire_values)
    try:
        packed = msgpack.packb(body, use_bin_type=True)
    except (ValueError, OverflowError, UnicodeEncodeError):
        return
    with contextlib.suppress(MessageError):
        storable(decode(packed))


@calm
@given(message=messages, data=st.data())
def test_bytes_that_are_almost_a_message(message: Any, data: st.DataObject) -> None:
    with contextlib.suppress(MessageError):
        storable(decode(data.draw(spoiled_bytes(encode(message)))))


@pytest.mark.parametrize(
    "body", [b"", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", 5, None]
)
def test_bytes_that_claim_to_be_large_cost_nothing(body: Any) -> None:
    with pytest.raises(MessageError):
        decode(body)


def test_a_token_list_cannot_grow_past_its_bound() -> None:
    import zlib

    bomb = zlib.compress(bytes(MAX_TOKENS * 4 + 4), 9)
    body = msgpack.unpackb(
        encode(
            Generate(
                run="r", id=ID, dataset="d", lane="short", prompt=as_tokens([1]), spans=(), max_new_tokens=1
            )
        )
    )
    assert len(bomb) < 100_000
    with pytest.raises(MessageError) as refused:
        decode(msgpack.packb(body | {"prompt": bomb}))
    assert refused.value.code == "message.size"


@given(text=odd_texts)
def test_a_text_that_utf8_cannot_say_holds_no_result_back(text: str) -> None:
    failure = Failure(
        id=ID,
        digest=None,
        capture=None,
        dataset="d",
        stage=Stage.GENERATE,
        attempts=1,
        code="c",
        message=text,
    )
    assert isinstance(decode(encode(Failed(run="r", failure=failure))), Failed)


# ---- what a server says

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


# ---- records in Redis

CAPTURE = CaptureSpec(name="final", hs_indices=(8,), norm="post", hidden_size=8)
SPEC = RunSpec(
    model="m",
    tokenizer_digest="a",
    template_digest="b",
    vocab_size=9,
    sampling=Sampling(),
    short_max_tokens=1,
    long_max_tokens=1,
    states=StatesMode.REPLAY,
    capture=CAPTURE,
)
VIEW = RunView(
    run=Run(id="i", spec=SPEC),
    settings=RunSettings(
        server_urls=("u",),
        capture_urls=("u",),
        concurrency={"short": 1},
        max_input_tokens=5,
        states=StatesMode.REPLAY,
        capture=CAPTURE,
        datasets={"B1": DatasetSettings()},
    ),
    output_dir="/o",
    closed=frozenset({"B1"}),
)
PROCESS = ProcessSnapshot(
    name="short@h",
    lane="short",
    node="h",
    pid=1,
    at=1.0,
    started=1.0,
    servers=(ServerSnapshot(url="u", state=ServerState.UP, since=1.0),),
)
CARRIED = Carried(run=VIEW.run, output_dir="/o", finished=False)


def written(kind: Any) -> Any:
    """JSON of a record whose fields are all filled."""
    return json.loads(as_text(kind.to_json()))


def board() -> Board:
    return Board(
        run_id="i",
        model="m",
        output_dir="/o",
        at=1.0,
        started=1.0,
        holder="h",
        states="replay",
        finished=False,
        datasets=(
            DatasetBoard(
                name="B1",
                wanted=1,
                reading=False,
                generated=1,
                stored=1,
                failed=0,
                truncated=0,
                tokens=1,
                prompt_tokens=1,
                queued=0,
                max_samples=None,
                max_tokens=5,
                closed=False,
                finished=False,
            ),
        ),
        lanes=(LaneBoard(name="short", limit_per_server=1, limit=1, in_flight=0, waiting=0, processes=1),),
        servers=(
            ServerBoard(url="u", lanes=("short",), state=ServerState.UP, since=1.0, reason="", in_flight=0),
        ),
        sinks=(
            SinkBoard(
                name="s", node="h", state="running", says="", waiting=0, spool_bytes=1, spool_max_bytes=2
            ),
        ),
        rates=Rates(over_s=1.0, generated_tokens_per_s=1.0, stored_tokens_per_s=1.0, samples_per_s=1.0),
        left_s=1.0,
        window=1,
        unacked=0,
        sink_waiting=0,
        wasted=0,
        republished=0,
        spool_bytes=0,
        disk_free_bytes=None,
        notes=("n",),
    )


def test_records_in_redis_come_back_equal() -> None:
    assert RunView.from_json(written(VIEW)) == VIEW
    assert ProcessSnapshot.from_json(written(PROCESS)) == PROCESS
    assert Board.from_json(written(board())) == board()


@settings(calm, max_examples=100)
@given(data=st.data())
def test_records_in_redis(redis_url: str, data: st.DataObject) -> None:
    from producer.status_table import draw, facts

    with Redis.from_url(redis_url) as redis:
        redis.set(BOARD, data.draw(texts(written(board()))))
        redis.set(process_key("a"), data.draw(texts(written(PROCESS))))
        redis.set(SETTINGS, data.draw(texts(written(VIEW))))
        redis.set(RUN, data.draw(texts(written(CARRIED))))
        found = read_board(redis)
        if found is not None:
            # what status shows of it
            draw(found, found.notes)
            facts(found)
        assert all(isinstance(one.pid, int) for one in read_processes(redis))
        view, carried = read_view(redis), read_carried(redis)
        assert view is None or isinstance(view.output_dir, str)
        assert carried is None or isinstance(carried.run.id, str)


def test_what_is_nested_too_deep_is_no_record(redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        for key in (BOARD, process_key("a"), SETTINGS, RUN):
            redis.set(key, deep())
        assert (read_board(redis), read_processes(redis), read_view(redis), read_carried(redis)) == (
            None,
            (),
            None,
            None,
        )
