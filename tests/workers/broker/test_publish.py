"""Publishing: which queue, what Flower shows, what it costs."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from broker_stage import Stage, body_of

from storage.errors import EyasError, UsageError
from storage.sample import Failure, Finish, Response, SpoolRef, States
from storage.sample import Stage as SampleStage
from storage.tokens import as_tokens, response_digest
from workers.broker.connection import ping_or_explain, without_password
from workers.broker.messages import Capture, Captured, Failed, Responded, decode
from workers.broker.publish import order_key, publish, publish_many, queue_of, summary, task_name
from workers.broker.queues import Lane, role_of
from workers.lane.tasks import outcome_text

TOKENS = as_tokens([1, 2, 3, 4, 5])
RESPONSE = Response(
    id=bytes(16),
    digest=response_digest(TOKENS),
    dataset="B2",
    tokens=TOKENS,
    prompt_length=3,
    spans=(),
    text="",
    finish=Finish.STOP,
)
STATES = States(
    id=bytes(16),
    digest=response_digest(TOKENS),
    dataset="B2",
    capture="eagle3",
    spool=SpoolRef(node="node7", name="x", shape=(5, 4, 8), crc32=1),
    facts_id="",
    hs_indices=(1, 2, 3, 4),
    norm="post",
)
CAPTURE = Capture(
    run="r" * 32,
    id=bytes(16),
    digest=response_digest(TOKENS),
    dataset="B2",
    tokens=TOKENS,
    prompt_length=3,
    capture="eagle3",
)
FAILURE = Failure(
    id=bytes(16),
    digest=None,
    capture=None,
    dataset="B2",
    stage=SampleStage.GENERATE,
    attempts=3,
    code="server.refused",
    message="",
)


def test_each_message_goes_to_its_queue_under_its_task_in_words_for_flower(stage: Stage) -> None:
    generate = stage.orders(1, lane="long")[0]
    seen = {
        queue_of(message): (task_name(message), summary(message))
        for message in (
            generate,
            CAPTURE,
            Responded(run="r", response=RESPONSE),
            Captured(run="r", states=STATES),
        )
    }
    assert seen == {
        "long": ("generate.long", "B1 · 5 tok"),
        "capture": ("capture", "B2 · 5 tok"),
        "sink": ("store", "B2 · 5 tok"),
        "sink.node7": ("store", "B2 · 5 rows"),
    }
    assert queue_of(Responded(run="r", response=RESPONSE, states=STATES)) == "sink.node7"
    assert queue_of(Failed(run="r", failure=FAILURE)) == "sink"


def test_results_read_like_a_line_of_flower() -> None:
    timed = replace(RESPONSE, timings=replace(RESPONSE.timings, e2e_s=0.5))
    assert outcome_text(Responded(run="r", response=timed)) == "2 tok · 4 tok/s · stop"
    assert outcome_text(Captured(run="r", states=STATES)) == "5 rows × 4 layers · 0 kB"
    assert outcome_text(Failed(run="r", failure=FAILURE)) == "dead letter · server.refused"


def test_an_order_has_one_name_however_often_it_is_published_and_another_for_another_response() -> None:
    assert order_key(CAPTURE) == order_key(replace(CAPTURE, capture="eagle3"))
    assert order_key(CAPTURE) != order_key(replace(CAPTURE, digest=bytes(16)))
    assert order_key(CAPTURE) != order_key(replace(CAPTURE, run="s" * 32))


def test_a_batch_arrives_whole_and_in_order_and_says_nothing_twice(stage: Stage) -> None:
    orders = stage.orders(1203)
    assert publish_many(stage.app, iter(orders)) == 1203
    raw = stage.redis.lrange("short", 0, -1)
    assert [decode(body_of(each)).id for each in reversed(raw)] == [order.id for order in orders]  # type: ignore[union-attr]
    message = json.loads(raw[0])
    assert message["headers"]["argsrepr"] == "B1 · 5 tok"
    assert len({json.loads(each)["properties"]["correlation_id"] for each in raw}) == 1203


def test_publishing_costs_little(stage: Stage) -> None:
    orders = stage.orders(3000)
    publish(stage.app, orders[0])
    began = time.process_time()
    publish_many(stage.app, orders)
    assert (time.process_time() - began) / 3000 < 350e-6


def test_a_message_of_4096_tokens_takes_less_than_18_kilobytes(stage: Stage) -> None:
    # Ids drawn at random are the worst that compression can meet.
    tokens = as_tokens(np.random.default_rng(0).integers(0, 150_000, 4096))
    publish(stage.app, replace(CAPTURE, tokens=tokens))
    assert len(stage.redis.lindex("capture", 0)) < 18_000


@pytest.mark.parametrize("queues", [[], ["short", "long"], ["nonsense"], ["sink", "sink.node1"], [""]])
def test_a_worker_of_no_one_lane_is_refused(queues: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        role_of(queues)
    assert refused.value.code == "worker.queues"
    assert "-Q short" in str(refused.value.hint)


def test_a_worker_serves_the_lane_it_names() -> None:
    assert [role_of([name]) for name in ("short", "long", "capture", "sink")] == [*Lane, None]


def test_a_refused_worker_says_so_in_one_line_and_ends_with_2(stage: Stage) -> None:
    worker = stage.worker("short,long", name="x")
    assert worker.popen.wait(30) == 2
    assert "error: a worker serves one queue, and `-Q short,long` names 2\n\nhint: " in worker.text()
    assert "Traceback" not in worker.text()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("redis://127.0.0.1:1/0", "redis.away"),
        ("http://127.0.0.1:6379", "redis.url"),
        ("redis://127.0.0.1:port/0", "redis.url"),
    ],
)
def test_a_redis_that_does_not_answer_is_explained(url: str, code: str) -> None:
    with pytest.raises(EyasError) as away:
        ping_or_explain(url)
    assert away.value.code == code
    assert away.value.hint


def test_a_redis_that_answers_is_given_back(redis_url: str) -> None:
    with ping_or_explain(redis_url) as client:
        assert client.ping()


def test_passwords_are_never_printed() -> None:
    assert without_password("redis://user:secret@host:1/0") == "redis://***@host:1/0"
    assert without_password("redis://host:1/0") == "redis://host:1/0"
