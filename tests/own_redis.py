"""A Redis that a test stops or kills and starts again, on the same port and with its data."""

import subprocess
import time
from pathlib import Path

import redis

from producer.machine.redis_server import find_redis, free_port, redis_arguments

STARTS_WITHIN_S = 60.0


class OwnRedis:
    """Runs from the start; a test ends it with `stop` or `kill`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._arguments = redis_arguments(find_redis(), folder=folder, port=self.port, password=None)
        # Every write reaches the disk, so that what is compared is what Eyas does.
        self._arguments += ["--appendfsync", "always"]
        self.start()

    def start(self) -> None:
        """Returns once it answers."""
        self._process = subprocess.Popen(
            self._arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + STARTS_WITHIN_S
        with redis.Redis(port=self.port) as client:
            while not _answers(client):
                assert time.monotonic() < deadline, "Redis does not answer"
                time.sleep(0.02)

    def stop(self) -> None:
        """SIGTERM."""
        self._process.terminate()
        self._process.wait(20)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
