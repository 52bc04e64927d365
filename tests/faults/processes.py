"""Supervised processes: each is started, restarted when it dies, and may be held down for a while.

Knows no Redis and no Celery; which processes there are is `cluster.py`'s.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

FIRST_DELAY_S = 0.2
"""Before a restart; doubled for each further one, as the supervisor of `producer up` does."""
LONGEST_DELAY_S = 10.0
HEALTHY_AFTER_S = 15.0
"""A process that lived so long begins at the first delay again."""


@dataclass(slots=True, kw_only=True, eq=False)
class Supervised:
    """One process by its command. Started and reaped by the supervisor's thread alone."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    restarts: int = 0
    held: bool = False
    """Not restarted while this is set."""
    started_at: float = 0.0
    start_at: float = 0.0
    deaths: int = 0
    """In a row, each soon after its start."""
    ends: list[int] = field(default_factory=list)
    """Exit statuses."""

    @property
    def pid(self) -> int | None:
        process = self.process
        return None if process is None else process.pid

    def send(self, number: int) -> bool:
        """Whether there was a process to send it to."""
        process = self.process
        if process is None or process.poll() is not None:
            return False
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
            return True
        return False

    def kill(self) -> bool:
        """SIGKILL to the process alone: what it started must find out by itself."""
        return self.send(signal.SIGKILL)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.started_at = time.monotonic()

    def reap(self) -> None:
        if self.process is None or self.process.poll() is None:
            return
        self.ends.append(self.process.returncode)
        lived_s = time.monotonic() - self.started_at
        self.deaths = 1 if lived_s > HEALTHY_AFTER_S else self.deaths + 1
        self.start_at = time.monotonic() + min(FIRST_DELAY_S * 2 ** min(self.deaths - 1, 30), LONGEST_DELAY_S)
        self.process = None
        self.restarts += 1


class Supervisor:
    """Keeps processes running, in a thread."""

    def __init__(self) -> None:
        self.processes: dict[str, Supervised] = {}
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def add(self, process: Supervised) -> Supervised:
        with self._lock:
            self.processes[process.name] = process
            process.start()
        return process

    def hold(self, name: str, number: int = signal.SIGKILL) -> None:
        """End it with this signal and leave it down."""
        process = self.processes[name]
        with self._lock:
            process.held = True
        process.send(number)
        deadline = time.monotonic() + 60
        while process.process is not None:
            if time.monotonic() > deadline:
                raise AssertionError(f"{name} does not end")
            time.sleep(0.02)

    def release(self, name: str) -> None:
        """Start what was held."""
        with self._lock:
            process = self.processes[name]
            process.held, process.start_at, process.deaths = False, 0.0, 0
            if process.process is None:
                process.start()

    def end(self) -> None:
        """Kill everything; nothing is restarted any more."""
        self._stopping.set()
        self._thread.join()
        for process in self.processes.values():
            process.send(signal.SIGCONT)
            process.kill()
        for process in self.processes.values():
            if process.process is not None:
                process.process.wait()

    def terminate(self, within_s: float) -> list[str]:
        """SIGTERM to all, nothing is restarted any more; the names of those that did not heed it."""
        self._stopping.set()
        self._thread.join()
        for process in self.processes.values():
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if all(p.process is None or p.process.poll() is not None for p in self.processes.values()):
                return []
            time.sleep(0.05)
        return [n for n, p in self.processes.items() if p.process is not None and p.process.poll() is None]

    def _run(self) -> None:
        while not self._stopping.wait(0.05):
            with self._lock:
                for process in self.processes.values():
                    process.reap()
                    if process.process is None and not process.held and time.monotonic() >= process.start_at:
                        process.start()


def children_of(pid: int) -> list[psutil.Process]:
    """Everything a process has started, and what those have; empty when it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
