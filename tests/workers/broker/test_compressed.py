"""A message that says it is compressed is set aside unread, however large it would become."""

import base64
import bz2
import json
import lzma
import zlib
from collections.abc import Callable

import psutil
import pytest
from broker_stage import Stage, until

from workers.broker.keys import GARBAGE

BOMB_BYTES = 1 << 30
PACKERS: dict[str, Callable[[], object]] = {
    "application/x-gzip": zlib.compressobj,
    "application/x-bz2": bz2.BZ2Compressor,
    "application/x-lzma": lzma.LZMACompressor,
}


def bomb(kind: str) -> bytes:
    """`BOMB_BYTES` zeros, packed, without ever being in memory."""
    packer = PACKERS[kind]()
    block = bytes(1 << 24)
    packed = [packer.compress(block) for _ in range(BOMB_BYTES // len(block))]
    return b"".join([*packed, packer.flush()])


@pytest.mark.parametrize("kind", ["application/x-gzip", "application/x-bz2"])
def test_a_compressed_message_is_set_aside_unread(stage: Stage, kind: str) -> None:
    server = stage.server()
    stage.settings(server_urls=(server.url,))
    packed = bomb(kind)
    assert len(packed) < BOMB_BYTES // 500
    envelope = {
        "body": base64.b64encode(packed).decode(),
        "headers": {"id": "a", "task": "generate.short", "compression": kind},
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "properties": {
            "delivery_tag": "a",
            "body_encoding": "base64",
            "delivery_info": {"exchange": "", "routing_key": "short"},
        },
    }
    stage.redis.lpush("short", json.dumps(envelope))
    good = stage.orders(3)
    stage.publish(good)
    worker = stage.worker()
    until(lambda: stage.waiting("sink") == 3, "the good ones are done")
    assert stage.redis.llen(GARBAGE) == 1
    # unpacked, it would have been in memory at least once
    assert psutil.Process(worker.popen.pid).memory_info().rss < BOMB_BYTES // 2
