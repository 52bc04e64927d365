"""Processes a benchmark starts, waits for, reads the use of, and ends.

It measures nothing by itself and starts nothing that was not asked for.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def start(command: Sequence[str], log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """A process of this repository, in its own group."""
    with log.open("ab") as file:
        options.setdefault("stdout", file)
        return subprocess.Popen(command, stderr=file, cwd=ROOT, start_new_session=True, **options)


@contextlib.contextmanager
def running(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """The processes, ended at the end."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until(condition: Callable[[], Any], what: str, within_s: float) -> Any:
    """What the condition gives, once it gives something."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"error: not within {within_s:.0f} s: {what}")
        time.sleep(0.05)
    return found


def rss_mb(pid: int) -> float:
    """Resident memory of a process, MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_s(pid: int) -> float:
    """Processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
