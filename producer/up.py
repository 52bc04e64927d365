"""`producer up`: brings what is missing up on this machine, waits until all of it is ready, and returns."""

import os
from pathlib import Path

import click

from producer import options
from producer.machine.bring_up import bring_up
from producer.machine.services import Request
from producer.machine.up_state import StateFolder, UpState
from producer.talk import say
from storage.errors import UnavailableError
from workers.broker.queues import Lane
from workers.config import load_config, load_grace_s, state_dir


def running_here(redis_url: str, node: str) -> frozenset[str]:
    """Lanes, and `sink`, of this node that somebody else started on this Redis.

    Raises `UnavailableError` when the Redis does not answer.
    """
    from workers.board.presence import living
    from workers.broker.connection import ping_or_explain

    try:
        ping_or_explain(redis_url).close()
    except UnavailableError as error:
        if error.code == "redis.away":
            error.hint = "start that Redis, or leave `--redis-url` out: `producer up` starts one of its own"
        raise
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
    "--flower-login/--no-flower-login",
    default=True,
    help="A random login for Flower. Without one everybody on this machine can see and stop the workers.",
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
    flower_login: bool,
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
    load_grace_s()  # wrong, it would fail in every worker
    own_spool = engine and not os.environ.get("EYAS_SPOOL_DIR")
    request = Request(
        redis_url=redis_url,
        output_dir=output_dir.absolute() if output_dir else None,
        spool_dir=folder.path / "spool" if own_spool else config.spool_dir,
        owns_spool=own_spool,
        node=config.node,
        capacity={
            Lane.SHORT.value: short_capacity,
            Lane.LONG.value: long_capacity,
            Lane.CAPTURE.value: capture_capacity,
        },
        flower=flower,
        flower_port=flower_port,
        flower_login=flower_login,
        engine=engine,
        engine_port=engine_port,
        engine_pace_ms=(engine_pace_ttft_ms, engine_pace_tpot_ms),
        running=running_here(redis_url, config.node) if redis_url and not _is_up(folder) else frozenset(),
    )
    known = folder.read_state()
    state = bring_up(request, config, folder)
    click.echo(table(state))
    if state.flower_login and (known is None or known.flower_login != state.flower_login):
        name, _, password = state.flower_login.partition(":")
        say(f"Flower's login: {name}, password {password} (kept in {folder.path / 'up.json'})")
    say("next: `producer enqueue`; `producer watch` follows it, `producer down` stops everything")
    return 0


def _is_up(folder: StateFolder) -> bool:
    state = folder.read_state()
    return state is not None and state.is_running()
