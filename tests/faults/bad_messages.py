"""Messages that are none: garbage in every queue, other versions, other runs, orders twice."""

import base64
import json
from collections.abc import Iterator

import msgpack
from redis import RedisError

from tests.faults.fault import Fault, Stage

QUEUES = ("short", "long", "capture", "sink")


def all_faults() -> Iterator[Fault]:
    yield Fault(kind="garbage in the queues", victim="", run=garbage)
    yield Fault(kind="messages of another version", victim="", run=other_version)
    yield Fault(kind="messages delivered twice", victim="", run=twice, weight=2)


def queues(stage: Stage) -> tuple[str, ...]:
    return (*QUEUES, *(f"sink.{node.name}" for node in stage.cluster.nodes))


def garbage(stage: Stage) -> None:
    """Bytes that are no message, JSON that is none, a message without a body, and random bodies."""
    dice = stage.dice
    for queue in queues(stage):
        task = _task_of(queue)
        _push(stage, queue, b"\xff\x00 no message")
        _push(stage, queue, b'{"body": 7}')
        _push(stage, queue, b"{}")
        _push(
            stage, queue, envelope(queue, task, dice.randbytes(dice.randrange(1, 2000)), dice.getrandbits(64))
        )
        _push(stage, queue, envelope(queue, "no.such.task", b"", dice.getrandbits(64)))


def other_version(stage: Stage) -> None:
    """What a worker of an older or newer release would send: a body with another version number."""
    for queue in queues(stage):
        body = msgpack.packb({"v": 999, "type": "Generate", "new": True})
        _push(stage, queue, envelope(queue, _task_of(queue), body, stage.dice.getrandbits(64)))
        altered = _real_body(stage, queue)
        if altered is not None:
            _push(stage, queue, envelope(queue, _task_of(queue), altered, stage.dice.getrandbits(64)))


def twice(stage: Stage) -> None:
    """Whatever waits in a queue is put there once more, bit by bit the same."""
    for queue in queues(stage):
        try:
            for raw in stage.cluster.client.lrange(queue, 0, 20):
                stage.cluster.client.lpush(queue, raw)
        except (RedisError, OSError):
            return


def envelope(queue: str, task: str, body: bytes, number: int) -> bytes:
    """A task's message as kombu keeps it in a list."""
    name = f"{number:016x}"
    packed = base64.b64encode(msgpack.packb(([body], {}, {}))).decode()
    content = {
        "body": packed,
        "content-type": "application/x-msgpack",
        "content-encoding": "binary",
        "headers": {"lang": "py", "task": task, "id": name, "argsrepr": "", "kwargsrepr": ""},
        "properties": {
            "correlation_id": name,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "delivery_tag": name,
            "body_encoding": "base64",
            "priority": 0,
        },
    }
    return json.dumps(content).encode()


def _real_body(stage: Stage, queue: str) -> bytes | None:
    """A waiting message's body with another version number; None when none waits."""
    try:
        raw = stage.cluster.client.lindex(queue, 0)
        (body,), *_ = msgpack.unpackb(base64.b64decode(json.loads(raw)["body"]))
        content = msgpack.unpackb(body)
        if isinstance(content, list):
            content[0] = 999
        else:
            content["v"] = 999
        return msgpack.packb(content)
    except (RedisError, OSError, ValueError, TypeError, KeyError):
        return None


def _push(stage: Stage, queue: str, raw: bytes) -> None:
    try:
        stage.cluster.client.lpush(queue, raw)
    except (RedisError, OSError):
        return


def _task_of(queue: str) -> str:
    if queue.startswith("sink"):
        return "store"
    return "capture" if queue == "capture" else f"generate.{queue}"
