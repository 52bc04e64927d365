"""Processes by their identity, not by their number alone: so that nothing foreign is ever killed.

A process is known by its pid together with the moment it started, and by a mark in its environment that
its children inherit. This file starts nothing and knows no state file.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MARK = "EYAS_UP"
"""Environment variable with the random token of one `producer up`."""
FOLDER = "EYAS_STATE_DIR"
"""Beside it, the state folder it belongs to: known also when what is in the folder is gone."""
SUPERVISOR = "producer.machine.supervisor"
"""The module that the supervisor's command names."""
PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process, for ever: a pid that is used again has another start."""

    pid: int
    started: str
    """What the system says of its start; equal strings, same process."""


def identity(pid: int) -> Identity | None:
    """The process that has this pid now; None when there is none or only its zombie is left."""
    started = _started(pid)
    return Identity(pid=pid, started=started) if started else None


def is_alive(process: Identity) -> bool:
    """Whether this very process still runs."""
    return _started(process.pid) == process.started


def marked(token: str) -> list[int]:
    """Pids of living processes whose environment carries this token, ourselves excepted.

    Empty where the system shows no environments (macOS): there the recorded identities have to do.
    """
    return [pid for pid, marks in _marks() if marks[MARK] == token]


def of_folder(folder: Path) -> dict[str, list[int]]:
    """Token → pids of living processes that some `up` started for this state folder.

    Found by what their environments say, so also when the folder's own files were deleted.
    """
    found: dict[str, list[int]] = {}
    for pid, marks in _marks():
        if marks.get(FOLDER) == str(folder):
            found.setdefault(marks[MARK], []).append(pid)
    return found


def is_supervisor(pid: int) -> bool:
    """Whether this process is the supervisor of an `up`."""
    try:
        return SUPERVISOR.encode() in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _marks() -> Iterator[tuple[int, dict[str, str]]]:
    """Living processes with a mark, ourselves excepted, and the `EYAS_*` variables they were started with."""
    for pid in _pids():
        try:
            environment = (PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        if f"{MARK}=".encode() not in environment:
            continue
        words = (os.fsdecode(word).partition("=") for word in environment.split(b"\0"))
        marks = {name: value for name, _, value in words if name.startswith("EYAS_")}
        if MARK in marks and pid != os.getpid() and _started(pid):
            yield pid, marks


def send(pid: int, number: signal.Signals) -> None:
    """Signal one process; one that is gone is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_group(leader: int) -> None:
    """SIGKILL what is left of a process group; call it while the leader is not reaped yet."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_all(token: str, recorded: Iterable[Identity], grace_s: float) -> list[int]:
    """Ends whatever carries the token or is one of the recorded: SIGTERM, and SIGKILL after the grace.

    Returns the pids it ended. Used when no supervisor is left to do it.
    """
    known = list(recorded)
    ended: set[int] = set()
    deadline = time.monotonic() + grace_s
    number = signal.SIGTERM
    while True:
        living = {*marked(token), *(p.pid for p in known if is_alive(p))} - {os.getpid()}
        if not living:
            return sorted(ended)
        for pid in living if number is signal.SIGKILL else living - ended:
            send(pid, number)
        ended |= living
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        time.sleep(0.05)


def _pids() -> list[int]:
    try:
        return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()]
    except OSError:
        return []


def _started(pid: int) -> str:
    if sys.platform != "linux":
        said = subprocess.run(
            ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout.split(maxsplit=1)
        return "" if len(said) < 2 or said[0].startswith("Z") else said[1].strip()
    try:
        line = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # the name in parentheses may hold spaces: fields count from the last one (proc(5): state is the
    # 3rd field, the start in clock ticks since boot the 22nd)
    fields = line.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else f"{_boot()}:{fields[19]}"


@cache
def _boot() -> str:
    """Which boot of which machine: a state file may outlive the one and be shared with another."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
