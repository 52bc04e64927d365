"""Real sink processes on a real Redis, and made-up lanes that answer what the feeder publishes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import redis

from storage.errors import FullError
from storage.spool import Spool
from storage.store import Store
from tests.workers.sink.making import answer_order
from workers.board.processes import ProcessSnapshot, read_processes
from workers.broker.celeryconfig import TIMING_VARIABLE, Timing
from workers.broker.messages import Capture, Generate, decode
from workers.broker.publish import publish_many
from workers.celery import create_app
from workers.config import load_config

ROOT = Path(__file__).parents[3]
TIMING = {"visibility_s": 2, "renew_s": 0.5, "sweep_s": 0.5}


def wait_until(condition: Callable[[], object], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.02)


class Machine:
    """One machine: its Redis, spool, output folder and sinks."""

    def __init__(self, redis_url: str, folder: Path, node: str = "node1") -> None:
        self.redis_url, self.folder, self.node = redis_url, folder, node
        self.client = redis.Redis.from_url(redis_url)
        self.environ = {
            "EYAS_REDIS_URL": redis_url,
            "EYAS_SPOOL_DIR": str(folder / "spool"),
            "EYAS_NODE": node,
            TIMING_VARIABLE: json.dumps(TIMING),
        }
        self.spool = Spool(folder / "spool", node, 10**9)
        self.app = create_app(load_config(self.environ, folder), Timing(**TIMING))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def sink(
        self, *, name: str = "sink", kill_at: str = "", output: Path | None = None, app: str = ""
    ) -> subprocess.Popen[bytes]:
        """A sink process; `kill_at` as `killing.py` says."""
        environ = {**os.environ, **self.environ, "PYTHONPATH": str(ROOT), "EYAS_TEST_KILL_AT": kill_at}
        if output is not None:
            environ["EYAS_OUTPUT_DIR"] = str(output)
        app = app or ("tests.workers.sink.killing" if kill_at else "workers")
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-P", "threads", "-c", "1"]
        command += ["-Q", "sink", "-n", f"{name}@test", "-E"]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        self._processes.append(process)
        return process

    def log(self, name: str = "sink") -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def snapshot(self, name: str = "sink") -> ProcessSnapshot | None:
        return next((p for p in read_processes(self.client) if p.name == f"{name}@test"), None)

    def lanes(self, store: Store, *, spoil: Callable[[object], object] = lambda result: result) -> None:
        """Answer what is published, in a thread, without Celery: pop, answer, publish the result.

        A pace of 20 a second, so that a run of a few dozen is several batches.
        """

        def work() -> None:
            while not self._stopping.is_set():
                try:
                    found = self.client.brpop(["short", "long", "capture"], timeout=0.2)
                    if found is None:
                        continue
                    self._stopping.wait(0.05)
                    order = order_in(found[1])
                    result = spoil(answer_order(store, self.spool, order))
                    if result is not None:
                        publish_many(self.app, [result], self._stopping)
                except (redis.RedisError, FullError):
                    self._stopping.wait(0.1)

        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def end(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(10)
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.app.close()
        self.app.redis.close()
        self.client.close()


def order_in(raw: bytes) -> Generate | Capture:
    """The order in a message as kombu keeps it in a list."""
    import base64

    import msgpack

    (body,), *_ = msgpack.unpackb(base64.b64decode(json.loads(raw)["body"]))
    return decode(body)
