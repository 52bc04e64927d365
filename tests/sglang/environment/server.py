"""Starts a real SGLang on this machine's CPU for a test, and ends it with all of its processes.

One at a time on the machine, however many test runs there are: each takes a core and a half.
What is asked of the server is the test's; how its environment is made is in `build.py`.
"""

import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.sglang.environment.build import Environment, alone, cache_folder

KEEPER = '("$@"; kill -KILL 0) & cat; kill -KILL 0'
"""A shell that leads the server's process group and kills all of it when the server ends or when its own
stdin does, as that of a test run that was killed. The detokenizer does not notice by itself."""
START_WITHIN_S = 240.0
"""A start takes 20 s on an idle core; the rest is for machines that do other things too."""
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    # an idle scheduler that does not sleep burns a whole core
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
    *("--context-length", "2048", "--max-total-tokens", "16384", "--max-running-requests", "32"),
    # of memory that other programs use too: the default claims nearly all of it
    *("--mem-fraction-static", "0.3"),
    *("--random-seed", "1", "--watchdog-timeout", "600", "--log-level", "warning"),
)
"""What a CPU needs, and sizes for a model of these tests. A flag given again counts last."""


@dataclass(frozen=True, slots=True)
class RealServer:
    """A running SGLang."""

    url: str
    process: "subprocess.Popen[bytes]"
    """The keeper of its process group; it ends with the server."""
    log: Path

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])


@contextmanager
def running_sglang(
    environment: Environment,
    *flags: str,
    log: Path,
    environ: Mapping[str, str] | None = None,
    recipe: Path | None = None,
) -> Iterator[RealServer]:
    """`python -m sglang.launch_server` on a free port, ready; `environ` is added to its environment.

    A `recipe` is a script that starts it, given the flags. Raises `RuntimeError` with the end of its log
    when it does not start.
    """
    with alone(cache_folder() / "sglang-server.lock"):
        server = _start(environment, flags, log, environ or {}, recipe)
        try:
            _await_ready(server)
            yield server
        finally:
            _end(server.process)


def _start(
    environment: Environment,
    flags: tuple[str, ...],
    log: Path,
    more: Mapping[str, str],
    recipe: Path | None,
) -> RealServer:
    port = _free_port()
    command = [
        *("sh", "-c", KEEPER, "keeper"),
        *((str(recipe),) if recipe else (str(environment.python), "-m", "sglang.launch_server")),
        *("--model-path", str(environment.model), "--host", "127.0.0.1", "--port", str(port)),
        *FLAGS,
        *flags,
    ]
    environ = {
        # recipes say `python`
        "PATH": f"{environment.python.parent}:{os.environ['PATH']}",
        "MODEL": str(environment.model),
        "HOME": os.environ.get("HOME", "/"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Without plugins unless a test says so: the environment may have some installed.
        "SGLANG_PLUGINS": "none",
        **more,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=log.parent,
            start_new_session=True,
        )
    return RealServer(f"http://127.0.0.1:{port}", process, log)


def _await_ready(server: RealServer) -> None:
    """Returns when `/ready` says 200."""
    deadline = time.monotonic() + START_WITHIN_S
    while server.alive and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{server.url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"SGLang did not start:\n{server.last_words()}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the group and take away the shared memory it had: asked to end, an idle one still drains 10 s."""
    left = _shared_memory(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
    for path in left:
        path.unlink(missing_ok=True)


def _shared_memory(group: int) -> set[Path]:
    """The files in memory that processes of this group have mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                found |= set(re.findall(r"/dev/shm/\S+", (process / "maps").read_text()))
    return {Path(path) for path in found}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
