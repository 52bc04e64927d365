"""Which run a Redis database carries, and the view of it that lanes, sinks and commands share.

One database carries one unfinished run. The folder is the truth: everything here can be written
again from it, and is, by the feeder. What is published for the lanes to do is not here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis

from storage.errors import UnsuitableError
from storage.json_records import parse_json
from storage.run import Run, RunSpec, read_run
from storage.settings import RunSettings
from workers.broker.keys import BOARD, FIRST_FACTS, RUN, SETTINGS, WINDOW
from workers.config import state_dir

CLAIM = """
local held = redis.call('GET', KEYS[1])
local readable, run = pcall(cjson.decode, held or '')
if readable and type(run) == 'table' and type(run.id) == 'string' and type(run.output_dir) == 'string' then
  if ARGV[3] == 'absent' then return held end
  if run.id ~= ARGV[1] then
    if not run.finished then return held end
    redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5])
  end
end
redis.call('SET', KEYS[1], ARGV[2])
return false
"""
"""Look and write in one step, so that of two runs that begin at once one is refused. What is no
record of a run is overwritten: nobody could go on with it. A finished run's settings, window, board
and servers go with it."""

FINISH = """
local held = redis.call('GET', KEYS[1])
if not held then return 0 end
local readable, run = pcall(cjson.decode, held)
if not readable or type(run) ~= 'table' then return 0 end
if run.id ~= ARGV[1] or run.finished == (ARGV[2] == '1') then return 0 end
redis.call('SET', KEYS[1], ARGV[3])
return 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The run that a Redis database carries."""

    run: Run
    output_dir: str
    """The run's folder as `enqueue` named it; another node may mount it elsewhere."""
    finished: bool
    """Whether every wanted prompt had its outcome when the feeder last looked."""

    def to_json(self) -> dict[str, Any]:
        """As `eyas:run` holds it."""
        return {
            "id": self.run.id,
            "fingerprint": self.run.spec.fingerprint,
            "output_dir": self.output_dir,
            "spec": self.run.spec.to_json(),
            "finished": self.finished,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What a process must know of the run to work for it; lanes read it every second."""

    run: Run
    settings: RunSettings
    output_dir: str
    """The run's folder as `enqueue` named it."""
    closed: frozenset[str] = field(default_factory=frozenset)
    """Datasets that want no more responses, because their caps are reached: a `Generate` of them
    is acknowledged unrun. Their `Capture` orders still run: a stored response wants its states."""

    def to_json(self) -> dict[str, Any]:
        """As `eyas:settings` holds it."""
        return {
            "run": {"id": self.run.id, "spec": self.run.spec.to_json()},
            "settings": self.settings.to_json(),
            "output_dir": self.output_dir,
            "closed": sorted(self.closed),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RunView":
        """The inverse of `to_json`; raises `KeyError`, `TypeError` or `ValueError`."""
        run = content["run"]
        return cls(
            run=Run(id=str(run["id"]), spec=RunSpec.from_json(run["spec"])),
            settings=RunSettings.from_json(content["settings"]),
            output_dir=str(content["output_dir"]),
            closed=frozenset(map(str, content["closed"])),
        )


def claim(redis: Redis, run: Run, output_dir: str | Path) -> None:
    """Make this database carry the run, as unfinished.

    Raises `UnsuitableError` (`redis.other_run`) when it carries another that is not finished.
    """
    held = _claim(redis, run, output_dir, "any")
    if held is not None:
        raise _other_run(held, output_dir)


def check_free(redis: Redis, output_dir: Path) -> None:
    """Raises `UnsuitableError` (`redis.other_run`) when a claim for this folder would be refused.

    Asked before a run is made, so that a refusal leaves no folder behind.
    """
    carried = read_carried(redis)
    if carried is None or carried.finished:
        return
    # Looked at after Redis: whoever begins a run here at this moment makes the file, then claims.
    run = read_run(output_dir)
    if run is None or run.id != carried.run.id:
        raise _other_run({"output_dir": carried.output_dir}, output_dir)


def claim_if_absent(redis: Redis, run: Run, output_dir: str | Path) -> None:
    """Make this database carry the run if it carries none, as after Redis lost its data.

    Raises `UnsuitableError` (`redis.other_run`) when it carries another, finished or not: only
    `enqueue` begins a run in another's place.
    """
    held = _claim(redis, run, output_dir, "absent")
    if held is not None and held["id"] != run.id:
        raise _other_run(held, output_dir)


def _claim(redis: Redis, run: Run, output_dir: str | Path, when: str) -> dict[str, Any] | None:
    """None when claimed, otherwise what is in the way."""
    new = json.dumps(Carried(run=run, output_dir=str(output_dir), finished=False).to_json())
    held = redis.eval(CLAIM, 5, RUN, SETTINGS, WINDOW, BOARD, FIRST_FACTS, run.id, new, when)
    return None if held is None else dict(json.loads(held))


def _other_run(held: Mapping[str, Any], output_dir: str | Path) -> UnsuitableError:
    if held["output_dir"] == str(output_dir):
        return UnsuitableError(
            f"this Redis carries an unfinished run that is not in its folder `{output_dir}` any more",
            code="redis.other_run",
            # a sink that still runs would give an emptied Redis the old run again
            hint="put that folder back; or begin anew: `producer down`, then "
            f"`rm -r '{state_dir() / 'redis'}'` (a Redis of your own: `FLUSHDB`), then `producer up`",
        )
    return UnsuitableError(
        f"this Redis carries the run of `{held['output_dir']}`, not that of `{output_dir}`",
        code="redis.other_run",
        hint="let that run finish, or give this one its own database with `EYAS_REDIS_URL` (…/1)",
    )


def read_carried(redis: Redis) -> Carried | None:
    """The run this database carries, or None when it carries none that can be read."""
    content = _read(redis, RUN)
    if content is None:
        return None
    try:
        return Carried(
            run=Run(id=str(content["id"]), spec=RunSpec.from_json(content["spec"])),
            output_dir=str(content["output_dir"]),
            finished=bool(content["finished"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def finish(redis: Redis, run_id: str, *, finished: bool = True) -> bool:
    """Mark the run finished, or not after all; whether that changed anything."""
    carried = read_carried(redis)
    if carried is None or carried.run.id != run_id:
        return False
    new = Carried(run=carried.run, output_dir=carried.output_dir, finished=finished)
    return bool(redis.eval(FINISH, 1, RUN, run_id, str(int(finished)), json.dumps(new.to_json())))


def publish_view(redis: Redis, view: RunView) -> None:
    """Let every process see the view; they look once a second."""
    redis.set(SETTINGS, json.dumps(view.to_json()))


def read_view(redis: Redis) -> RunView | None:
    """The view last published, or None when there is none that can be read."""
    content = _read(redis, SETTINGS)
    if content is None:
        return None
    try:
        return RunView.from_json(content)
    except (KeyError, TypeError, ValueError):
        return None


def _read(redis: Redis, key: str) -> dict[str, Any] | None:
    data = redis.get(key)
    if data is None:
        return None
    try:
        content = parse_json(data)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
