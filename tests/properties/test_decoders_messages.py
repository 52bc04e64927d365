"""Messages in queues: any bytes are a message that can be stored, or are set aside."""

import contextlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hostile import (
    odd_texts,
    plain,
    spoiled_bytes,
    values,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.sample import Failure, Finish, Kind, Response, Span, SpoolRef, Stage, States, Timings
from storage.tokens import as_tokens
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

calm = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ID, DIGEST = bytes(range(16)), bytes(range(16, 32))


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
