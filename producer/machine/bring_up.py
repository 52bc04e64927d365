"""Everything on this machine brought up: the supervisor started, watched until all is ready, or why not.

What runs is decided in `services.py` and kept running by `supervisor.py`. What a person asks for is
the command's (`producer/up.py`).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from producer.machine.processes import MARK, send
from producer.machine.services import Request, make_plan
from producer.machine.take_down import clean_up, end_strays, take_down
from producer.machine.up_state import Plan, ServiceReport, StateFolder, UpState
from producer.talk import say
from storage.errors import UnavailableError, UsageError
from workers.config import Config

LOOK_S = 0.05
ANSWERS_WITHIN_S = 30.0
"""A supervisor that has written no state by then has not started."""


def bring_up(
    request: Request, config: Config, folder: StateFolder, environ: Mapping[str, str] = os.environ
) -> UpState:
    """Everything asked for, running and ready; what runs already is left as it is.

    `environ` is what the processes inherit. Raises `UnavailableError` naming the log when something
    does not come up; then nothing of this call is left behind.
    """
    if request.output_dir is not None:
        check_writable(request.output_dir)
    folder.create()
    with folder.alone("up", lambda other: say(f"waiting for {other}, which has begun already")):
        state = folder.read_state()
        if state is None:
            end_strays(folder)
        elif not state.is_running():
            clean_up(folder, state)
            state = None
        if state is None:
            plan = make_plan(request, folder, None)
            return _begin(plan, folder, _environment(plan, config, folder, environ))
        return _add(request, folder, state)


def check_writable(output_dir: Path) -> None:
    """Raises `UsageError` when a sink could not write there, before anything is started for it."""
    # the nearest that exists: making the folder is the run's business
    place = next(path for path in (output_dir, *output_dir.parents) if path.exists())
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return
    why = "cannot be written by this user" if place.is_dir() else "is no folder"
    raise UsageError(
        f"`--output-dir {output_dir}`: `{place}` {why}",
        code="output.unwritable",
        hint=f"chmod u+rwx '{place}', or name another folder with `--output-dir`"
        if place.is_dir()
        else "name another folder with `--output-dir`",
    )


def _add(request: Request, folder: StateFolder, state: UpState) -> UpState:
    """What is asked for and not there yet, added to what runs."""
    running = [name for name, report in state.processes.items() if report.state != "failed"]
    before = folder.read_plan()
    before = replace(before, services=tuple(s for s in before.services if s.name in running))
    plan = make_plan(request, folder, before)
    wanted = [service.name for service in plan.services if service.name not in running]
    if unheeded := _unheeded(request, before):
        say(f"warning: {' and '.join(unheeded)} cannot change while it is up: `producer down` first")
    if not wanted:
        say(f"already up: {', '.join(running)} (supervisor {state.pid}); `producer down` stops it")
        return _wait(folder, before)
    say(f"already up: {', '.join(running)}; starting {', '.join(wanted)}")
    folder.write_plan(plan)
    send(state.pid, signal.SIGUSR1)
    return _wait(folder, plan)


def _unheeded(request: Request, before: Plan) -> list[str]:
    """What is asked for and differs from what everything that runs was told."""
    asked = {"--redis-url": request.redis_url, "--output-dir": request.output_dir and str(request.output_dir)}
    told = {"--redis-url": before.redis_url, "--output-dir": before.output_dir}
    return [flag for flag, value in asked.items() if value and value != told[flag]]


def _begin(plan: Plan, folder: StateFolder, environment: Mapping[str, str]) -> UpState:
    say(f"starting {', '.join(s.name for s in plan.services)}; logs in {folder.logs}")
    folder.write_plan(plan)
    with folder.log("supervisor").open("ab", buffering=0) as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "producer.machine.supervisor", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: token_hex(16)},
            # the folder of settings files is the caller's; workers get theirs by environment alone
            cwd=folder.path,
            start_new_session=True,
        )
    try:
        return _wait(folder, plan, supervisor)
    except KeyboardInterrupt:
        say("interrupted; stopping what was started")
        take_down(folder)
        raise


def _wait(folder: StateFolder, plan: Plan, supervisor: "subprocess.Popen[bytes] | None" = None) -> UpState:
    """Says each service as it becomes ready; returns when all are."""
    began = time.monotonic()
    said: set[str] | None = None
    while True:
        state = folder.read_state()
        if state is not None and state.plan_number == plan.number and _is_by(state, supervisor):
            ready = {name for name, report in state.processes.items() if report.state == "ready"}
            if said is None:
                # what was ready before this call is no news
                said = set() if supervisor else ready
            for name in sorted(ready - said, key=list(state.processes).index):
                say(f"{name} ready after {state.processes[name].ready_s:.1f} s")
            said |= ready
            if state.phase == "failed":
                _raise_failed(folder, state, supervisor)
            if state.phase == "up":
                asked = {service.name for service in plan.services}
                failed = [n for n, r in state.processes.items() if n in asked and r.state == "failed"]
                if failed:
                    raise _failed(failed[0], state.processes[failed[0]])
                return state
            if not state.is_running():
                raise _no_supervisor(folder)
        elif (
            time.monotonic() - began > ANSWERS_WITHIN_S
            if supervisor is None
            else supervisor.poll() is not None
        ):
            raise _no_supervisor(folder)
        time.sleep(LOOK_S)


def _is_by(state: UpState, supervisor: "subprocess.Popen[bytes] | None") -> bool:
    return supervisor is None or state.pid == supervisor.pid


def _raise_failed(folder: StateFolder, state: UpState, supervisor: "subprocess.Popen[bytes] | None") -> None:
    while state.is_running():
        if supervisor is not None:
            supervisor.poll()
        time.sleep(LOOK_S)
    name, report = next((n, r) for n, r in state.processes.items() if r.state == "failed")
    folder.forget()
    raise _failed(name, report)


def _failed(name: str, report: ServiceReport) -> UnavailableError:
    try:
        lines = Path(report.log).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    # a command of ours ends with its hint; what was wrong is the line before that
    errors = [line for line in lines if line.startswith("error: ")]
    last = f": {(errors or lines)[-1].removeprefix('error: ').strip()}" if lines else ""
    return UnavailableError(f"{name} {report.said}{last}", code="up.failed", hint=f"less {report.log}")


def _no_supervisor(folder: StateFolder) -> UnavailableError:
    return UnavailableError(
        "the supervisor ended before everything was ready",
        code="up.supervisor",
        hint=f"less {folder.log('supervisor')}",
    )


def _environment(
    plan: Plan, config: Config, folder: StateFolder, environ: Mapping[str, str]
) -> dict[str, str]:
    """What every process of ours is told; secrets go this way and never into a file."""
    told = {
        **environ,
        "PYTHONPATH": import_path(environ),
        "EYAS_STATE_DIR": str(folder.path),
        "EYAS_REDIS_URL": plan.redis_url,
        "EYAS_NODE": config.node,
        "EYAS_SPOOL_DIR": plan.spool_dir,
        "EYAS_SPOOL_MAX_GB": str(config.spool_max_bytes / 1e9),
    }
    if config.server_api_key:
        told["EYAS_SERVER_API_KEY"] = config.server_api_key
    if plan.output_dir:
        told["EYAS_OUTPUT_DIR"] = plan.output_dir
    else:
        told.pop("EYAS_OUTPUT_DIR", None)
    return told


def import_path(environ: Mapping[str, str]) -> str:
    """A PYTHONPATH under which a process finds this very Eyas from any folder, installed or not."""
    root = str(Path(__file__).absolute().parents[2])
    others = (str(Path(p).absolute()) for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p)
    return os.pathsep.join(dict.fromkeys([root, *others]))
