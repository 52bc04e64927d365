"""A supervisor of small real processes: web servers of the standard library in place of workers."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from producer.machine.processes import MARK
from producer.machine.redis_server import free_port
from producer.machine.up_state import Plan, Service, StateFolder, UpState

SERVER = """
import http.server, os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("serving", os.getpid(), child.pid, flush=True)
class Quiet(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
def end(*a):
    if "stubborn" not in sys.argv: child.kill(); os._exit(0)
signal.signal(signal.SIGTERM, end)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Quiet).serve_forever()
"""
"""A server with a child of its own, as a lane has; `stubborn` does not heed SIGTERM."""


def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    """Wait for a condition; fail when it does not come."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come"
        time.sleep(0.02)


def service(
    name: str, *, after: tuple[str, ...] = (), stops: int = 0, words: tuple[str, ...] = ()
) -> Service:
    port = free_port()
    return Service(
        name=name,
        arguments=(sys.executable, "-c", SERVER, str(port), *words),
        environment={},
        check="http",
        target=f"http://127.0.0.1:{port}/",
        address=f"http://127.0.0.1:{port}",
        after=after,
        stops=stops,
    )


def plan(folder: StateFolder, *services: Service, owner: object = None, number: int = 1) -> Plan:
    return Plan(
        number=number,
        redis_url="redis://127.0.0.1:1/0",
        engine_url=None,
        flower_url=None,
        flower_login=None,
        output_dir=None,
        spool_dir=str(folder.path / "spool"),
        owns_spool=True,
        owner=owner,
        services=services,
    )


class Supervised:
    """One supervisor in its own folder."""

    def __init__(self, path: Path, token: str) -> None:
        self.folder = StateFolder(path)
        self.folder.create()
        self.token = token
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *services: Service, owner: object = None) -> None:
        self.folder.write_plan(plan(self.folder, *services, owner=owner))
        with self.folder.log("supervisor").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "producer.machine.supervisor", str(self.folder.path)],
                env={**os.environ, MARK: self.token},
                stderr=log,
                start_new_session=True,
            )

    @property
    def state(self) -> UpState:
        state = self.folder.read_state()
        assert state is not None
        return state

    def is_up(self) -> bool:
        state = self.folder.read_state()
        return state is not None and state.phase == "up" and state.pid == self.process.pid

    def ended(self) -> bool:
        return self.process.poll() is not None

    def marked(self) -> list[psutil.Process]:
        """Every living process with the mark, found by psutil and not by the code under test."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.token:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def pid_of(supervised: Supervised, name: str) -> int:
    pid = supervised.state.processes[name].pid
    assert pid is not None
    return pid
