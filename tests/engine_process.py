"""Starts a real embedded engine for a test and ends it after."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LISTENING = re.compile(r"engine listening url=(\S+)")


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine."""

    url: str
    process: subprocess.Popen[str]

    def terminate(self) -> None:
        """Ask it to drain."""
        self.process.send_signal(signal.SIGTERM)

    def cpu_s(self) -> float:
        """Processor time it has used, seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running_engine(*options: object) -> Iterator[Engine]:
    """`python -m workers.engine` on a free port, listening."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("EYAS_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.engine", "--port", "0", *map(str, options)],
        stderr=subprocess.PIPE,
        text=True,
        env={**environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            found = LISTENING.search(line)
            if found:
                yield Engine(found[1], process)
                return
        raise AssertionError(f"the engine ended with {process.wait()}: {''.join(said)}")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()
