"""A real SGLang on this machine's CPU for a benchmark: started, measured from outside, ended.

What it is started with beyond that is the benchmark's. An idle one sleeps (`--sleep-on-idle`), so that
several may be up and take turns.
"""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_WITHIN_S = 240.0
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--dtype", "float32", "--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--disable-radix-cache"),
    *("--chunked-prefill-size", "-1", "--max-total-tokens", "32768", "--max-running-requests", "32"),
    *("--mem-fraction-static", "0.3", "--watchdog-timeout", "3600", "--log-level", "warning"),
)
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server:
    """One running server."""

    url: str
    group: int
    """Its process group."""

    def cpu_s(self) -> tuple[float, float]:
        """CPU time its scheduler process has used, and all of its processes, seconds."""
        scheduler = whole = 0.0
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                title = (entry / "cmdline").read_text()
            except (OSError, ValueError):
                continue
            if int(fields[2]) == self.group:
                used = (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND
                whole += used
                scheduler += used if title.startswith("sglang::scheduler") else 0.0
        return scheduler, whole


@contextmanager
def running(python: str, model: Path, *flags: str, log: Path, environ: Mapping[str, str]) -> Iterator[Server]:
    """The server, ready; `environ` is added to its environment.

    Raises `RuntimeError` with the end of its log when it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", "sglang.launch_server", *where, *FLAGS, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ
            | {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            | dict(environ),
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_WITHIN_S
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("\n".join(log.read_text(errors="replace").splitlines()[-30:]))
            time.sleep(0.2)
        yield Server(url, process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
