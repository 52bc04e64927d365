"""Which processes `producer up` wants on this machine, each as the command a person could type.

Pure decision: it looks for free ports and for a Redis binary, and starts nothing (`supervisor.py` does).
"""

import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_urlsafe

from producer.machine.processes import Identity
from producer.machine.redis_server import find_redis, free_port, redis_arguments
from producer.machine.up_state import Plan, Service, StateFolder
from workers.broker.queues import SINK, Lane

FLOWER_NAME = "eyas"
"""Who logs in to Flower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked of `up`."""

    redis_url: str | None
    """A Redis that runs already; None for one of our own."""
    output_dir: Path | None
    """None leaves it to the run that Redis carries."""
    spool_dir: Path
    owns_spool: bool
    """Whether the spool lies in the state folder and goes when everything stops."""
    node: str
    capacity: dict[str, int]
    """Lane → calls in flight its process can hold."""
    flower: bool
    flower_port: int
    """Taken if free, else any."""
    flower_login: bool
    """Whether Flower asks for a random login."""
    engine: bool
    engine_port: int
    """Taken if free, else any."""
    engine_pace_ms: tuple[float, float]
    """Least time to the engine's first token, and to each further one."""
    running: frozenset[str] = frozenset()
    """Lanes (and `sink`) that somebody else runs on this node already."""
    owner: Identity | None = None
    """Process whose end takes everything down."""


def make_plan(request: Request, folder: StateFolder, before: Plan | None) -> Plan:
    """All services asked for; those of the plan before stay as they are.

    Raises `UnavailableError` when a Redis is needed and this machine has none to start.
    """
    kept = {service.name: service for service in before.services} if before else {}
    redis_url = before.redis_url if before else request.redis_url
    services: list[Service] = list(kept.values())
    if redis_url is None:
        redis, redis_url = _redis(folder)
        services.append(redis)
    engine_url = before.engine_url if before else None
    if request.engine and "engine" not in kept:
        engine = _engine(request)
        services.append(engine)
        engine_url = engine.address
    services += [s for s in _lanes(request, redis_url) if s.name not in kept]
    flower_url = before.flower_url if before else None
    flower_login = before.flower_login if before else None
    if request.flower and "flower" not in kept:
        flower_login = f"{FLOWER_NAME}:{token_urlsafe(12)}" if request.flower_login else None
        flower = _flower(request, flower_login)
        services.append(flower)
        flower_url = flower.address
    return Plan(
        number=before.number + 1 if before else 1,
        redis_url=redis_url,
        engine_url=engine_url,
        flower_url=flower_url,
        flower_login=flower_login,
        output_dir=before.output_dir if before else str(request.output_dir) if request.output_dir else None,
        spool_dir=before.spool_dir if before else str(request.spool_dir),
        owns_spool=before.owns_spool if before else request.owns_spool,
        owner=before.owner if before else request.owner,
        services=tuple(services),
    )


def _redis(folder: StateFolder) -> tuple[Service, str]:
    port, password = free_port(), token_urlsafe(24)
    arguments = redis_arguments(find_redis(), folder=folder.redis, port=port, password=password)
    url = f"redis://:{password}@127.0.0.1:{port}/0"
    service = Service(
        name="redis",
        arguments=tuple(arguments),
        environment={},
        check="redis",
        target=url,
        address=f"redis://127.0.0.1:{port}/0",
        stops=2,
    )
    return service, url


def _engine(request: Request) -> Service:
    port = _port(request.engine_port)
    url = f"http://127.0.0.1:{port}"
    arguments = [sys.executable, "-m", "workers.engine", "--port", str(port)]
    arguments += ["--spool-dir", str(request.spool_dir)]
    first_ms, further_ms = request.engine_pace_ms
    arguments += ["--pace-ttft-ms", str(first_ms), "--pace-tpot-ms", str(further_ms)]
    return Service(
        name="engine",
        arguments=tuple(arguments),
        environment={},
        check="http",
        target=f"{url}/health",
        address=url,
        stops=1,
    )


def _lanes(request: Request, redis_url: str) -> Iterator[Service]:
    for name in (*Lane, SINK):
        if name not in request.running:
            capacity = request.capacity.get(name, 1)
            yield Service(
                name=name,
                arguments=(
                    *_celery("worker", "-P", "threads", "-c", str(capacity), "-Q", name),
                    *("-n", f"{name}@%h", "-E", "--loglevel", "INFO"),
                    # no talk among workers is needed, and mingling delays each start by a second
                    *("--without-gossip", "--without-mingle"),
                ),
                environment={},
                check="celery",
                target=name,
                address="one writer" if name == SINK else f"up to {capacity} calls in flight",
                after=("redis",),
            )


def _flower(request: Request, login: str | None) -> Service:
    port = _port(request.flower_port)
    url = f"http://127.0.0.1:{port}"
    return Service(
        name="flower",
        arguments=_celery("flower", "--address=127.0.0.1", f"--port={port}"),
        # in the environment: arguments are shown to every user by `ps`
        environment={"FLOWER_BASIC_AUTH": login} if login else {},
        check="http",
        target=f"{url}/healthcheck",
        address=url,
        after=("redis",),
    )


def _celery(command: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "celery", "-A", "workers", command, *arguments)


def _port(wanted: int) -> int:
    """The port wanted if it can be had, else any."""
    with socket.socket() as probe:
        # as the servers do: a port in TIME_WAIT is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
        return int(probe.getsockname()[1])
