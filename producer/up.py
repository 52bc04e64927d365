"""`producer up`: brings what is missing up on this machine, waits until all of it is ready, and returns.

What runs is decided in `services.py` and kept running by `supervisor.py`; this file starts that, watches
it come up, and says how it went.
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

import click

from producer import options
from producer.down import clean_up, take_down
from producer.lanes import LANES
from producer.processes import MARK, send
from producer.services import Request, make_plan
from producer.talk import say
from producer.up_state import Plan, ServiceReport, StateFolder, UpState
from storage.errors import UnavailableError
from workers.config import Config, load_config, state_dir

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
    folder.create()
    with folder.alone():
        state = folder.read_state()
        if state is not None and not state.is_running():
            clean_up(folder, state)
            state = None
        if state is None:
            plan = make_plan(request, folder, None)
            return _begin(plan, folder, _environment(plan, config, folder, environ))
        return _add(request, folder, state)


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
            [sys.executable, "-m", "producer.supervisor", str(folder.path)],
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
    last = f": {lines[-1].strip()}" if lines else ""
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
    root = str(Path(__file__).absolute().parent.parent)
    others = (str(Path(p).absolute()) for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p)
    return os.pathsep.join(dict.fromkeys([root, *others]))


def running_here(redis_url: str, node: str) -> frozenset[str]:
    """Lanes, and `sink`, of this node that somebody else started on this Redis.

    Raises `UnavailableError` when the Redis does not answer.
    """
    from workers.board.presence import living
    from workers.broker.connection import ping_or_explain

    ping_or_explain(redis_url).close()
    return frozenset(process.lane for process in living(redis_url) if process.node == node)


def table(state: UpState) -> str:
    """What runs and where, one line each."""
    from workers.broker.connection import without_password

    width = max(map(len, state.processes), default=0)
    lines = []
    for name, report in state.processes.items():
        restarts = f", restarted {report.restarts} times" if report.restarts else ""
        lines.append(f"{name:{width}}  {report.state:10}  {report.address}  (pid {report.pid}{restarts})")
    if "redis" not in state.processes:
        lines.insert(0, f"{'redis':{width}}  {'not ours':10}  {without_password(state.redis_url or '')}")
    return "\n".join(lines)


CAPACITY = "Calls in flight the process of this lane can hold; the run's limits decide how many it gets."

PACE = click.FloatRange(min=0)


@click.command("up")
@options.flag("--engine", is_flag=True, help="Also the embedded engine: a tiny model that needs no GPU.")
@options.flag(
    "--engine-port", type=click.IntRange(0, 65535), default=30000, help="Its port if free, else any."
)
@options.flag("--engine-pace-ttft-ms", type=PACE, default=0.0, help="Least time to its first token.")
@options.flag("--engine-pace-tpot-ms", type=PACE, default=0.0, help="Least time to each further token.")
@options.flag("--flower/--no-flower", default=True, help="Flower, the web page of the workers.")
@options.flag(
    "--flower-port", type=click.IntRange(0, 65535), default=5555, help="Its port if free, else any."
)
@options.flag(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    show_default="that of the run",
    metavar="DIR",
    help="The run's folder as this machine mounts it.",
)
@options.flag(
    "--redis-url",
    default=None,
    show_default="one of its own",
    metavar="URL",
    help="A Redis that runs already.",
)
@options.flag("--short-capacity", type=options.AT_LEAST_ONE, default=150, metavar="N", help=CAPACITY)
@options.flag("--long-capacity", type=options.AT_LEAST_ONE, default=32, metavar="N", help=CAPACITY)
@options.flag("--capture-capacity", type=options.AT_LEAST_ONE, default=64, metavar="N", help=CAPACITY)
def command(
    engine: bool,
    engine_port: int,
    engine_pace_ttft_ms: float,
    engine_pace_tpot_ms: float,
    flower: bool,
    flower_port: int,
    output_dir: Path | None,
    redis_url: str | None,
    short_capacity: int,
    long_capacity: int,
    capture_capacity: int,
) -> int:
    """Start what is missing on this machine, and keep it running.

    Redis, the three lanes, a sink and Flower, each restarted when it dies, all of it detached from this
    terminal. Says what runs already when it is called again.
    """
    folder = StateFolder(state_dir())
    config = load_config()
    own_spool = engine and not os.environ.get("EYAS_SPOOL_DIR")
    request = Request(
        redis_url=redis_url,
        output_dir=output_dir.absolute() if output_dir else None,
        spool_dir=folder.path / "spool" if own_spool else config.spool_dir,
        owns_spool=own_spool,
        node=config.node,
        capacity=dict(zip(LANES, (short_capacity, long_capacity, capture_capacity), strict=True)),
        flower=flower,
        flower_port=flower_port,
        engine=engine,
        engine_port=engine_port,
        engine_pace_ms=(engine_pace_ttft_ms, engine_pace_tpot_ms),
        running=running_here(redis_url, config.node) if redis_url and not _is_up(folder) else frozenset(),
    )
    state = bring_up(request, config, folder)
    click.echo(table(state))
    say("next: `producer enqueue`; `producer watch` follows it, `producer down` stops everything")
    return 0


def _is_up(folder: StateFolder) -> bool:
    state = folder.read_state()
    return state is not None and state.is_running()
