"""One machine as a user has it: a folder, a state folder, and the commands a person types."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


class Machine:
    """One state folder, and the commands a person types beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "EYAS_STATE_DIR": str(self.state_dir),
            "TMPDIR": str(folder / "tmp"),
        }
        (folder / "tmp").mkdir()

    def producer(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "producer.cli", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )

    def start(self, *arguments: str, log: Path) -> "subprocess.Popen[bytes]":
        """The command, going on beside the test, its output in `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "producer.cli", *arguments],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def storage(self, *arguments: str, within_s: float = 110) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "storage.cli", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )

    def up(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.producer("up", "--flower-port", "0", "--engine-port", "0", *arguments)

    @property
    def state(self) -> dict:
        return json.loads((self.state_dir / "up.json").read_text())

    def processes(self) -> list[psutil.Process]:
        """Every living process that was told of this state folder, whoever started it."""
        found = []
        for process in psutil.process_iter():
            try:
                told = process.environ().get("EYAS_STATE_DIR")
                if told == str(self.state_dir) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def ports(self) -> set[int]:
        """Ports that these processes listen on."""
        return {
            connection.laddr.port
            for process in self.processes()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }


@contextmanager
def machine_in(folder: Path) -> Iterator[Machine]:
    """A machine that leaves no process behind, whatever the test did."""
    it = Machine(folder)
    try:
        yield it
    finally:
        for process in it.processes():
            process.kill()
