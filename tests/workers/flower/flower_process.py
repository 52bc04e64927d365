"""A real `celery -A workers flower` for a test, on a free port, and what it answers."""

import base64
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from producer.machine.redis_server import free_port

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Answer:
    """One answer."""

    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Flower:
    """A running Flower."""

    port: int
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, login: str | None = None) -> Answer:
        """The answer to a path, whatever its status."""
        request = urllib.request.Request(self.url + path)
        if login:
            request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return Answer(answer.status, dict(answer.headers), answer.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, dict(error.headers), error.read().decode(errors="replace"))


@contextmanager
def running_flower(
    folder: Path, redis_url: str, *arguments: str, port: int | None = None, **variables: str
) -> Iterator[Flower]:
    """Flower as the README starts it, in a folder without a configuration file."""
    port, log = port or free_port(), folder / "flower.log"
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("EYAS_", "FLOWER_"))
    }
    environment |= {"PYTHONPATH": str(ROOT), "EYAS_REDIS_URL": redis_url, **variables}
    command = (sys.executable, "-m", "celery", "-A", "workers", "flower", f"--port={port}", *arguments)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    flower = Flower(port, process, log)
    try:
        deadline = time.monotonic() + 60
        while not _listens(flower):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield flower
    finally:
        process.kill()
        process.wait()


def _listens(flower: Flower) -> bool:
    try:
        flower.get("/throughput/static/words.js")
    except OSError:
        return False
    return True
