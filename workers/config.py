"""A process's own settings: where Redis, the output, the spool and the keys are.

Environment `EYAS_*` > `eyas.toml` in the working folder > the state file of `producer up` >
defaults. Flags come before all of these and are the commands' business. What belongs to a run
(servers, limits, caps) is not here: workers learn it from Redis.
"""

import math
import os
import socket
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import UsageError
from storage.files import checked_name
from storage.json_records import parse_json
from storage.suggest import did_you_mean

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
GRACE_S = 10
"""Calls that take minutes are not worth waiting for: they are made again."""
MOST_GRACE_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What one process needs to know before it can ask Redis."""

    redis_url: str
    """`EYAS_REDIS_URL`."""
    output_dir: Path | None
    """`EYAS_OUTPUT_DIR`; None leaves it to the run that Redis carries."""
    node: str
    """`EYAS_NODE`, the host's name unless set: names the spool and `sink.<node>`."""
    spool_dir: Path
    """`EYAS_SPOOL_DIR`."""
    spool_max_bytes: int
    """`EYAS_SPOOL_MAX_GB` in bytes."""
    server_api_key: str | None
    """`EYAS_SERVER_API_KEY`, sent as a bearer token; never stored or logged."""


def load_config(environ: Mapping[str, str] = os.environ, folder: Path = Path()) -> Config:
    """What this process is told by its environment, its folder and the state file.

    Raises `UsageError` for a value or a key of `eyas.toml` that cannot be used.
    """
    values = read_toml(folder / "eyas.toml")

    def value(name: str) -> str | None:
        found = environ.get(f"EYAS_{name.upper()}") or values.get(name)
        return None if found in (None, "") else str(found)

    spool = value("spool_dir")
    output = value("output_dir")
    return Config(
        redis_url=value("redis_url") or read_state(environ).get("redis_url") or DEFAULT_REDIS_URL,
        output_dir=Path(output).absolute() if output else None,
        node=checked_name(value("node") or socket.gethostname(), "node"),
        spool_dir=Path(spool).absolute() if spool else default_spool_dir(),
        spool_max_bytes=_gigabytes(value("spool_max_gb") or "64"),
        server_api_key=value("server_api_key"),
    )


def load_grace_s(environ: Mapping[str, str] = os.environ) -> float:
    """Seconds from SIGTERM until a worker is gone: `EYAS_GRACE_S`.

    Raises `UsageError` for what is no such number.
    """
    text = environ.get("EYAS_GRACE_S") or str(GRACE_S)
    try:
        grace_s = float(text)
    except ValueError:
        grace_s = math.nan
    if not 1 <= grace_s <= MOST_GRACE_S:
        raise UsageError(
            f"EYAS_GRACE_S `{text}` is no number of seconds from 1 to {MOST_GRACE_S}",
            code="settings.value",
            hint=f"unset EYAS_GRACE_S, for {GRACE_S} s",
        )
    return grace_s


def default_spool_dir() -> Path:
    """One folder for all of this user's processes on this machine."""
    return Path(tempfile.gettempdir()) / f"eyas-spool-{os.getuid()}"


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `producer up` keeps its state file and logs: `EYAS_STATE_DIR`, else XDG's place."""
    home = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(environ.get("EYAS_STATE_DIR") or Path(home) / "eyas").absolute()


def read_state(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What `producer up` wrote of itself on this machine, the texts of it; empty when nothing is up.

    A file that others may read or write is not believed: it holds Redis' password.
    """
    path = state_dir(environ) / "up.json"
    try:
        status = path.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            return {}
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in content.items() if isinstance(v, str)} if isinstance(content, dict) else {}


KNOWN_KEYS = frozenset(
    {
        *("redis_url", "output_dir", "node", "spool_dir", "spool_max_gb", "server_api_key"),
        *("manifest", "partition", "server_url", "capture_server_url", "model", "states", "capture"),
        *("max_samples", "max_tokens", "short_concurrency", "short_max_tokens", "long_concurrency"),
        *("long_max_tokens", "capture_concurrency", "allow_quantized_kv", "trust_remote_code"),
        *("temperature", "top_p", "top_k", "seed", "response_tokens"),
        *("engine", "engine_port", "engine_pace_ttft_ms", "engine_pace_tpot_ms", "flower", "flower_port"),
        "flower_login",
        *("short_capacity", "long_capacity", "capture_capacity"),
    }
)
"""Every key of `eyas.toml`: a flag's name with underscores."""
LIST_KEYS = frozenset({"server_url", "capture_server_url"})
"""Those whose flag may be given again."""


def read_toml(path: Path) -> dict[str, Any]:
    """The settings file's values; empty when there is none.

    Raises `UsageError` for text that is not TOML and for a key that is not known.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"`{path}` is not TOML: {error}",
            code="settings.syntax",
            hint='write lines like max_samples = 500 or manifest = "datasets.toml"',
        ) from None
    check_keys(values, KNOWN_KEYS, where=str(path))
    for key, value in values.items():
        several = isinstance(value, list) and all(isinstance(one, str) for one in value)
        plain = isinstance(value, str | int | float) and "\0" not in str(value)  # no path may hold a NUL
        if not plain and not (key in LIST_KEYS and several):
            raise UsageError(
                f"`{key}` in `{path}` is `{value}`",
                code="settings.value",
                hint="give it a text or a number; only server addresses may be a list",
            )
    return values


def check_keys(values: Mapping[str, Any], known: frozenset[str], *, where: str) -> None:
    """Raises `UsageError` for the first key that is not known, with the nearest that is."""
    for key in values:
        if key not in known:
            raise UsageError(
                f"unknown key `{key}` in `{where}`",
                code="settings.unknown",
                hint=did_you_mean(key, sorted(known), "known keys"),
            )


def _gigabytes(text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise UsageError(f"EYAS_SPOOL_MAX_GB `{text}` is not a size above 0", code="settings.value")
    return int(size * 1e9)
