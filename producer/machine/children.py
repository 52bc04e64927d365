"""One supervised process: started in a session of its own, and what is left of it once it ends.

When to start which, and what a death means, is the supervisor's business.
"""

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from producer.machine.processes import kill_group
from producer.machine.up_state import Service, ServiceReport

LOG_BYTES = 20_000_000
"""A log past this is set aside as `.1` when its service starts."""


@dataclass(slots=True, kw_only=True)
class Child:
    """One service as it runs now."""

    service: Service
    report: ServiceReport
    process: "subprocess.Popen[bytes] | None" = None
    started_at: float = 0.0
    """Of this process, monotonic seconds."""
    start_at: float = 0.0
    """Not to be started before."""
    deaths: int = 0
    """In a row, each soon after its start."""
    was_ready: bool = False
    """Ever: a service that was ready once is restarted for ever, one that never was has failed."""


def start(
    service: Service, environment: Mapping[str, str], folder: Path, log: Path
) -> "subprocess.Popen[bytes]":
    """The service's process, its output appended to `log`; raises `OSError` when there can be none.

    Its own session: signals meant for the supervisor's group pass it by, and its group's id is its pid,
    which is how what it leaves behind is found.
    """
    with suppress(FileNotFoundError):
        if log.stat().st_size > LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
    with log.open("ab", buffering=0) as output:
        log.chmod(0o600)
        return subprocess.Popen(
            service.arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, **service.environment},
            cwd=folder,
            start_new_session=True,
        )


def ended(process: "subprocess.Popen[bytes]") -> int | None:
    """How the process ended, or None while it runs.

    What it started and left behind in its group is killed before it is reaped: until then its pid, and
    so the group's id, cannot belong to anybody else.
    """
    if hasattr(os, "waitid"):
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_group(process.pid)
        return process.wait()
    status = process.poll()
    if status is not None:
        kill_group(process.pid)
    return status


def how_it_ended(status: int) -> str:
    """The exit status in words."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
