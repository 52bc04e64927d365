"""What is no order never stops a worker: it is set aside, acknowledged, and the next one is run."""

import json
from dataclasses import replace

import msgpack
from broker_stage import Stage, until

from workers.broker.messages import Failed, Responded, decode, encode
from workers.broker.publish import publish_many


def test_nothing_in_a_queue_stops_a_lane_and_it_is_kept_for_a_look(stage: Stage) -> None:
    server = stage.server(seconds=0.05)
    stage.settings(server_urls=(server.url,))
    good = stage.orders(3)

    # What no task message is, straight into the list that is the queue.
    stage.redis.lpush("short", b"\xff\xfe not text", b"[1, 2]", b"{}", b'"text"', b"null")
    stage.redis.lpush("short", json.dumps({"body": "AAAA", "headers": {}, "properties": {}}))
    stage.redis.lpush(
        "short", json.dumps({"body": "x", "headers": None, "properties": {"delivery_tag": "t"}})
    )
    # Task messages whose bodies are not ours.
    other_version = msgpack.packb({"v": 999, "type": "Generate", "run": good[0].run})
    for number, arguments in enumerate(
        [
            (),
            (b"not msgpack",),
            (other_version,),
            (b"",),
            ("text",),
            (1, 2),
            (b"a", b"b"),
            (encode(good[0])[:50],),
        ]
    ):
        stage.send(arguments, task_id=f"bad-{number}")
    # A task's name that no dictionary takes.
    listed = json.dumps(
        {
            "body": "AAAA",
            "headers": {"id": "listed", "task": ["generate.short"]},
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "properties": {
                "delivery_tag": "listed",
                "delivery_info": {"exchange": "", "routing_key": "short"},
            },
        }
    )
    stage.redis.lpush("short", listed)
    stage.send((encode(good[0]),), task="capture.nothing", task_id="unknown-task")
    stage.send((encode(good[0]),), task_id="pickled", content_type="application/x-python-serialize")
    stage.publish(good)

    worker = stage.worker()
    until(lambda: stage.waiting("sink") == 3, "the good ones are done")
    until(lambda: not stage.waiting() and not stage.unacked(), "nothing is left")
    assert not worker.ended()
    kept = stage.redis.lrange("eyas:garbage", 0, -1)
    assert b"\xff\xfe not text" in kept
    assert other_version in kept
    assert listed.encode() not in kept, "its envelope was read, so it is acknowledged too"
    assert len(kept) >= 15
    assert server.stats()["started"] == 3


def test_what_nobody_wants_is_acknowledged_unrun(stage: Stage) -> None:
    server = stage.server(seconds=0.05)
    stage.view = replace(stage.view, closed=frozenset({"B2"}))
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(5, dataset="B2"))
    stage.publish([replace(order, run="f" * 32) for order in stage.orders(5, first=100)])
    stage.publish(stage.orders(2))
    stage.worker()
    until(lambda: stage.waiting("sink") == 2, "the wanted ones are done")
    until(lambda: not stage.waiting() and not stage.unacked(), "the others are gone")
    assert server.stats()["started"] == 2
    assert stage.redis.llen("eyas:garbage") == 0


def test_an_error_of_our_own_ends_as_a_dead_letter_after_three_attempts(stage: Stage) -> None:
    server = stage.server(seconds=0.05)
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(3))
    worker = stage.worker(app="tests.workers.broker.faulty")
    until(lambda: stage.waiting("sink") == 3, "all three have an outcome")
    results = stage.results()
    assert {(r.failure.code, r.failure.attempts) for r in results if isinstance(r, Failed)} == {
        ("worker.error", 3)
    }
    assert not worker.ended()
    until(lambda: (s := stage.snapshot()) and s["failed"] == 3 and s["again"] == 6, "it is counted")


def test_a_result_for_the_sink_in_a_lanes_queue_is_set_aside(stage: Stage) -> None:
    server = stage.server(seconds=0.05)
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(1))
    stage.worker()
    until(lambda: stage.waiting("sink") == 1, "it is done")
    (result,) = stage.results()
    stage.send((encode(result),), task_id="result")
    until(lambda: stage.redis.llen("eyas:garbage") == 1, "it is set aside")
    assert isinstance(decode(stage.redis.lindex("eyas:garbage", 0)), Responded)
    publish_many(stage.app, stage.orders(1, first=50))
    until(lambda: stage.waiting("sink") == 2, "and the lane goes on")
