"""A stage for the broker's tests: real Redis, real `celery -A workers worker`, a paced server.

Processes lead their own groups, so that killing one kills what it started and nothing else.
"""

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import redis

from storage.run import Run, RunSpec, Sampling, StatesMode
from storage.settings import RunSettings
from storage.tokens import as_tokens, prompt_id
from workers.broker.celeryconfig import Timing
from workers.broker.messages import Generate, Message, decode
from workers.broker.publish import publish_many
from workers.celery import create_app
from workers.config import load_config
from workers.runs import RunView, publish_view

ROOT = Path(__file__).parents[3]
RUN = "0123456789abcdef" * 2
TIMING = {
    "visibility_s": 2,
    "renew_s": 0.4,
    "sweep_s": 0.5,
    "pulse_s": 0.2,
    "slots_s": 3,
    "drain_s": 1,
    "exit_s": 4,
}


def until(condition: Callable[[], Any], what: str, within_s: float = 30.0) -> Any:
    """What the condition gives, once it gives something."""
    deadline = time.monotonic() + within_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)


class Process:
    """A process that leads its own group."""

    def __init__(self, command: list[str], log: Path, **options: Any) -> None:
        self.log = log
        self.file = log.open("ab")
        options.setdefault("stdout", self.file)
        self.popen = subprocess.Popen(command, stderr=self.file, cwd=ROOT, start_new_session=True, **options)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait()
        self.file.close()
        if self.popen.stdout:
            self.popen.stdout.close()

    def ended(self) -> bool:
        return self.popen.poll() is not None

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Paced:
    """A paced server in its own process."""

    def __init__(self, folder: Path, seconds: float, port: int = 0) -> None:
        self.process = Process(
            [sys.executable, "ops/bench/paced_server.py", "--seconds", str(seconds), "--port", str(port)],
            folder / "paced.log",
            stdout=subprocess.PIPE,
        )
        assert self.process.popen.stdout
        self.port = json.loads(self.process.popen.stdout.readline())["port"]
        self.url = f"http://127.0.0.1:{self.port}"

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/stats", timeout=10) as reply:
            content: dict[str, Any] = json.load(reply)
            return content

    def set(self, **values: Any) -> None:
        request = urllib.request.Request(
            f"{self.url}/set",
            data=json.dumps(values).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=10).close()


class Stage:
    """One run on one Redis, with the workers a test starts."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder, self.redis_url = folder, redis_url
        self.redis = redis.Redis.from_url(redis_url)
        self.processes: list[Process] = []
        self.timing = dict(TIMING)
        environ = {"EYAS_REDIS_URL": redis_url, "EYAS_STATE_DIR": str(folder)}
        self.app = create_app(load_config(environ, folder), Timing(**self.timing))
        self.view = RunView(
            run=Run(id=RUN, spec=SPEC),
            settings=RunSettings(
                server_urls=(),
                capture_urls=(),
                concurrency={"short": 10, "long": 4, "capture": 4},
                max_input_tokens=32000,
                states=StatesMode.OFF,
                capture=None,
            ),
            output_dir=str(folder / "output"),
        )

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self.app.close()
        self.redis.close()

    def server(self, seconds: float = 0.2, port: int = 0) -> Paced:
        paced = Paced(self.folder, seconds, port)
        self.processes.append(paced.process)
        return paced

    def settings(self, **changes: Any) -> None:
        """Publish the view, with other settings."""
        self.view = replace(self.view, settings=replace(self.view.settings, **changes))
        publish_view(self.redis, self.view)

    def worker(
        self,
        queue: str = "short",
        *options: str,
        name: str | None = None,
        capacity: int | None = 20,
        app: str = "workers",
        **variables: str,
    ) -> Process:
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-P", "threads", "-E"]
        command += ["-Q", queue, "-n", f"{name or queue}@test", *options]
        command += ["-c", str(capacity)] if capacity else []
        environ = {k: v for k, v in os.environ.items() if not k.startswith("EYAS_")} | {
            "EYAS_REDIS_URL": self.redis_url,
            "EYAS_NODE": "node1",
            "EYAS_SPOOL_DIR": str(self.folder / "spool"),
            "EYAS_STATE_DIR": str(self.folder),
            "EYAS_INTERNAL_TIMING": json.dumps(self.timing),
            "PYTHONPATH": str(ROOT),
            **variables,
        }
        process = Process(command, self.folder / f"{name or queue}.log", env=environ)
        self.processes.append(process)
        return process

    def orders(
        self, count: int, *, lane: str = "short", dataset: str = "B1", first: int = 0
    ) -> list[Generate]:
        """Orders with different prompts."""
        made = []
        for number in range(first, first + count):
            tokens = as_tokens([10 + number % 1000, 10 + number // 1000, 7, 8, 9])
            made.append(
                Generate(
                    run=RUN,
                    id=prompt_id(dataset, tokens),
                    dataset=dataset,
                    lane=lane,
                    prompt=tokens,
                    spans=(),
                    max_new_tokens=100,
                )
            )
        return made

    def publish(self, orders: list[Any]) -> None:
        publish_many(self.app, orders)

    def send(
        self,
        arguments: tuple[Any, ...],
        *,
        task: str = "generate.short",
        task_id: str,
        queue: str = "short",
        **envelope: str,
    ) -> None:
        """A task message as anybody might write one."""
        body = base64.b64encode(msgpack.packb((list(arguments), {}, {}))).decode()
        content = {
            "body": body,
            "content-type": envelope.get("content_type", "application/x-msgpack"),
            "content-encoding": envelope.get("content_encoding", "binary"),
            "headers": {"lang": "py", "task": task, "id": task_id, "argsrepr": "", "kwargsrepr": ""},
            "properties": {
                "correlation_id": task_id,
                "delivery_info": {"exchange": "", "routing_key": queue},
                "delivery_tag": task_id,
                "body_encoding": "base64",
                "priority": 0,
            },
        }
        self.redis.lpush(queue, json.dumps(content))

    def snapshot(self, name: str = "short") -> dict[str, Any] | None:
        data = self.redis.get(f"eyas:process:{name}@test")
        return json.loads(data) if data else None

    def waiting(self, queue: str = "short") -> int:
        return int(self.redis.llen(queue))

    def unacked(self) -> int:
        return int(self.redis.hlen("unacked"))

    def results(self, queue: str = "sink") -> list[Message]:
        """Every result published and not taken."""
        return [decode(body_of(raw)) for raw in self.redis.lrange(queue, 0, -1)]


SPEC = RunSpec(
    model="paced",
    tokenizer_digest="t",
    template_digest="t",
    vocab_size=32000,
    sampling=Sampling(),
    short_max_tokens=1024,
    long_max_tokens=2048,
    states=StatesMode.OFF,
    capture=None,
)


def body_of(raw: bytes) -> bytes:
    """The one argument of a task message as it lies in Redis."""
    body: bytes = msgpack.unpackb(base64.b64decode(json.loads(raw)["body"]))[0][0]
    return body


@contextlib.contextmanager
def staged(folder: Path, redis_url: str) -> Iterator[Stage]:
    stage = Stage(folder, redis_url)
    try:
        yield stage
    finally:
        stage.close()
