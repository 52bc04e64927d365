"""Fixtures for sink and feeder: a spool, a Redis client, a host that never ends."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from storage.spool import Spool
from workers.stopping import StoppedError


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", "node1", 1_000_000_000)


class QuickHost:
    """A host that waits a tenth of what it is asked to, and remembers why."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.stopping = threading.Event()

    def pause(self, seconds: float, why: str) -> None:
        self.reasons.append(why)
        if self.stopping.wait(seconds / 10):
            raise StoppedError

    def resume(self) -> None:
        self.reasons.append("")


@pytest.fixture
def host() -> QuickHost:
    return QuickHost()
