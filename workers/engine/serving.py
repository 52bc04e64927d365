"""Puts an engine together and runs it: model, endpoints, listening socket, drain on SIGTERM."""

import asyncio
import dataclasses
import signal
import socket

import click
from aiohttp import web

from storage.errors import UnavailableError
from storage.spool import Spool
from workers.engine.backends import Backend, HashBackend, ModelBackend
from workers.engine.detokenize import Detokenizer
from workers.engine.generation import Generation
from workers.engine.llama import Llama
from workers.engine.model_config import read_config
from workers.engine.server import EngineServer
from workers.engine.settings import Settings
from workers.plugin.offering import Offered

LOOK_S = 0.05
"""How often a draining engine looks whether the last request is answered."""


async def serve(settings: Settings, spool: Spool | None) -> None:
    """Answer until SIGTERM or SIGINT, then finish what is in flight; a second signal ends at once.

    Raises `UnavailableError` when the address is taken.
    """
    listening = _listen(settings.host, settings.port)
    settings = dataclasses.replace(settings, port=listening.getsockname()[1])
    detokenizer = Detokenizer(settings.model_path)
    backend = _backend(settings, detokenizer)
    generation = Generation(settings, backend, detokenizer, spool)
    offered = Offered(spool) if spool is not None else None
    if offered is not None:
        offered.sweep_on()
    server = EngineServer(settings, backend, generation, offered)
    stopped = _signals()
    # A handler is cancelled when its client leaves: that is how an abandoned request stops computing.
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listening, backlog=1024).start()
    click.echo(
        f"engine listening url=http://{settings.host}:{settings.port} model={settings.served_name} "
        f"states={settings.states} slots={settings.slots}",
        err=True,
    )
    await stopped.acquire()
    server.drain()
    click.echo(f"engine draining in_flight={generation.in_flight}", err=True)
    while generation.in_flight and stopped.locked():
        await asyncio.sleep(LOOK_S)
    await runner.cleanup()
    backend.stop()
    click.echo("engine stopped", err=True)


def _backend(settings: Settings, detokenizer: Detokenizer) -> Backend:
    if settings.hashed:
        return HashBackend(read_config(settings.model_path), masked_ids=detokenizer.special_ids)
    model = Llama(settings.model_path)
    masked = detokenizer.special_ids | frozenset(model.config.eos_ids)
    return ModelBackend(model, slots=settings.slots, masked_ids=masked)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on `{host}:{port}`: {error.strerror}",
            code="engine.address",
            hint="choose another --port; 0 takes a free one",
        ) from None


def _signals() -> asyncio.Semaphore:
    """A semaphore that every SIGTERM or SIGINT releases once."""
    told = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.release)
    return told
