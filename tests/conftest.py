"""Fixtures that every folder of tests shares: a real Redis, one fresh database a test."""

import subprocess
import time
from collections.abc import Iterator

import pytest
import redis

from producer.machine.redis_server import find_redis, free_port, redis_arguments


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real Redis, append-only, on a free port, without a password."""
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    process = subprocess.Popen(
        redis_arguments(find_redis(), folder=folder, port=port, password=None),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with redis.Redis(port=port) as client:
            deadline = time.monotonic() + 20
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """The URL of an empty database."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server
