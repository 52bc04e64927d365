"""What `producer up` keeps on disk: the plan it asks for, and the state its supervisor reports.

`plan.json` is written by `up` alone and says what shall run; `up.json` by the supervisor alone and says
what does. Both hold Redis' password: mode 0600 in a folder of mode 0700. `workers/config.py` reads from
`up.json` where Redis is.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from producer.machine.processes import Identity, is_alive
from storage.errors import DamagedError, UnsuitableError
from storage.json_records import parse_json, read_record

Check = Literal["redis", "celery", "http"]
Phase = Literal["starting", "up", "stopping", "failed"]
ServiceState = Literal["waiting", "starting", "ready", "restarting", "failed", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One process that shall run."""

    name: str
    """`redis`, `engine`, `short`, `long`, `capture`, `sink`, `flower`."""
    arguments: tuple[str, ...]
    """The command."""
    environment: Mapping[str, str]
    """Added to the supervisor's own."""
    check: Check
    """How it is known to be ready."""
    target: str
    """What the check asks: a Redis URL, a node's name, an address to GET."""
    address: str
    """What a person is shown: where it is, or how big."""
    after: tuple[str, ...] = ()
    """Services that are ready before this one starts."""
    stops: int = 0
    """Lower stops earlier: what calls before what is called, Redis last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that one `producer up` asks for."""

    number: int
    """Counts the plans of one supervisor, so that `up` knows whether a state answers its own."""
    redis_url: str
    engine_url: str | None
    flower_url: str | None
    flower_login: str | None
    """`name:password` that Flower asks for; None where it asks nobody, or is not there."""
    output_dir: str | None
    spool_dir: str
    owns_spool: bool
    """Whether the spool lies in the state folder and goes with it."""
    owner: Identity | None
    """Process whose end takes everything down (`demo`); None outlives the terminal."""
    services: tuple[Service, ...]

    def service(self, name: str) -> Service | None:
        """The service of this name, if it is asked for."""
        return next((service for service in self.services if service.name == name), None)


@dataclass(slots=True, kw_only=True)
class ServiceReport:
    """How one service does."""

    state: ServiceState = "waiting"
    pid: int | None = None
    started: str | None = None
    """With `pid`, the process' identity."""
    ready_s: float | None = None
    """Seconds from its start until it was ready."""
    restarts: int = 0
    said: str = ""
    """Why it is not ready: how it ended last."""
    log: str = ""
    address: str = ""

    @property
    def identity(self) -> Identity | None:
        """The process, when one was started."""
        return Identity(pid=self.pid, started=self.started) if self.pid and self.started else None


@dataclass(slots=True, kw_only=True)
class UpState:
    """What the supervisor says of itself and of what it runs: `up.json`."""

    token: str
    """The mark in the environment of everything it started."""
    pid: int
    started: str
    host: str
    """Machine it runs on: a home folder may be shared by several."""
    phase: Phase = "starting"
    plan_number: int = 0
    """The plan this state answers."""
    up_once: bool = False
    """Whether everything was ready once: from then on nothing that fails takes the rest along."""
    error: str | None = None
    """Why it failed, one line."""
    redis_url: str | None = None
    engine_url: str | None = None
    flower_url: str | None = None
    flower_login: str | None = None
    output_dir: str | None = None
    spool_dir: str | None = None
    processes: dict[str, ServiceReport] = field(default_factory=dict)

    @property
    def supervisor(self) -> Identity:
        """The supervisor."""
        return Identity(pid=self.pid, started=self.started)

    def is_running(self) -> bool:
        """Whether the supervisor that wrote this still runs."""
        return is_alive(self.supervisor)

    def recorded(self) -> list[Identity]:
        """Every process it started, by identity."""
        return [report.identity for report in self.processes.values() if report.identity]


class StateFolder:
    """The folder of one `producer up`: plan, state, logs, lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.redis = path / "redis"

    def create(self) -> None:
        """Makes the folders, for this user's eyes only: Redis' files hold what is queued.

        Raises `UnsuitableError` when the folder is another user's: what it says would be believed.
        """
        for folder in (self.path, self.logs, self.redis):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise UnsuitableError(
                    f"`{folder}` belongs to another user",
                    code="up.folder",
                    hint="give a folder of your own with EYAS_STATE_DIR",
                )
        for folder in (self.logs, self.redis):
            folder.chmod(0o700)  # the folder around them may be one that was there, and open

    def log(self, name: str) -> Path:
        """Where a service's output goes."""
        return self.logs / f"{name}.log"

    def write_plan(self, plan: Plan) -> None:
        """Replaces the plan."""
        _write_private(self.path / "plan.json", asdict(plan))

    def read_plan(self) -> Plan:
        """The plan. Raises `DamagedError` without a sound one."""
        path = self.path / "plan.json"
        try:
            return read_record(Plan, parse_json(path.read_bytes()), extra="refused")
        except (OSError, ValueError) as error:
            raise DamagedError(
                f"`{path}` cannot be read: {error}"[:300],
                code="up.damaged",
                hint="`producer down`, then `producer up` again",
            ) from None

    def write_state(self, state: UpState) -> None:
        """Replaces the state."""
        _write_private(self.path / "up.json", asdict(state))

    def read_state(self) -> UpState | None:
        """What a supervisor wrote last; None when nothing sound is there."""
        try:
            content = parse_json((self.path / "up.json").read_bytes())
            return read_record(UpState, content, extra="ignored")
        except (OSError, ValueError):
            return None

    def forget(self) -> None:
        """Removes plan and state: nothing is up."""
        for name in ("up.json", "plan.json"):
            (self.path / name).unlink(missing_ok=True)
        (self.redis / "redis.conf").unlink(missing_ok=True)
        for left in self.path.glob("*.tmp"):
            left.unlink(missing_ok=True)

    def lock(self) -> int | None:
        """The supervisor's lock, which lives as long as its process; None while another holds it."""
        handle = self._open("lock")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return handle

    def release(self, handle: int) -> None:
        """Gives a lock back."""
        os.close(handle)

    @contextmanager
    def alone(self, command: str, wait: Callable[[str], object]) -> Iterator[None]:
        """One `up` or `down` at a time: a second waits, and then finds what the first has left.

        `wait` is told what it waits for, before it does.
        """
        handle = self._open("up.lock")
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                wait(os.pread(handle, 100, 0).decode(errors="replace").strip() or "another command")
                fcntl.flock(handle, fcntl.LOCK_EX)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"`producer {command}` (pid {os.getpid()})\n".encode(), 0)
            yield
        finally:
            os.close(handle)

    def _open(self, name: str) -> int:
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _write_private(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces `path` at once, readable by its owner only; not fsynced: it dies with the machine anyway."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with suppress(FileNotFoundError):
        temporary.unlink()
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    temporary.replace(path)
