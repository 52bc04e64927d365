"""SGLang's HTTP endpoints on aiohttp: routes, keys, health, what the server says of itself.

How `/generate` answers is in `generation.py`.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable

import numpy as np
from aiohttp import web

from workers.engine import info
from workers.engine.backends import Backend
from workers.engine.generation import Generation
from workers.engine.order import Order, Sampling
from workers.engine.refusal import Refusal
from workers.engine.settings import Settings
from workers.engine.spool_route import add_route
from workers.plugin.offering import Offered

OPEN_PATHS = frozenset({"/ready", "/health", "/health_generate", "/metrics"})
"""What needs no key, as on the real server."""
HEALTH_TIMEOUT_S = 20.0
"""A server that cannot make one token in this time is unhealthy."""
REQUEST_LIMIT_BYTES = 64 << 20
"""Largest body: well above the ids of the longest context."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """The endpoints of one engine."""

    def __init__(
        self, settings: Settings, backend: Backend, generation: Generation, offered: Offered | None
    ) -> None:
        self._settings = settings
        self._offered = offered
        self._backend = backend
        self._generation = generation
        self._draining = False

    def drain(self) -> None:
        """From now on `/ready` says 503; requests are still answered, so that none is lost on the way."""
        self._draining = True

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(
            middlewares=[self._authorize, self._refuse], client_max_size=REQUEST_LIMIT_BYTES
        )
        app.router.add_post("/generate", self._generation.handle)
        app.router.add_put("/generate", self._generation.handle)
        app.router.add_post("/abort_request", self._abort_request)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health_generate", self._health)
        if self._offered is not None:
            add_route(app, self._offered)
        return app

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = self._settings.api_key
        if key and request.path not in OPEN_PATHS:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as refusal:
            return web.json_response(refusal.body, status=refusal.status)
        except web.HTTPError as error:
            return web.json_response({"detail": error.reason}, status=error.status)

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(info.server_info(self._settings, self._backend.config))

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(info.model_info(self._settings, self._backend.config))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(info.models(self._settings))

    async def _loads(self, request: web.Request) -> web.Response:
        running, waiting = self._generation.running, self._generation.waiting
        return web.json_response(info.loads(self._settings, running=running, waiting=waiting))

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._draining else 200)

    async def _health(self, request: web.Request) -> web.Response:
        """One token, computed beside whatever runs."""
        if self._draining:
            return web.Response(status=503)
        sampling = Sampling(max_new_tokens=1, temperature=0.0)
        order = Order(tokens=np.zeros(1, np.int64), sampling=sampling, max_new_tokens=1)
        try:
            await asyncio.wait_for(self._backend.complete(order), HEALTH_TIMEOUT_S)
        except TimeoutError:
            return web.Response(status=503)
        return web.Response()

    async def _abort_request(self, request: web.Request) -> web.Response:
        """Ends every request whose id begins with `rid`, as the real server does."""
        body = await request.json()
        self._generation.abort(str(body.get("rid") or ""), everything=bool(body.get("abort_all")))
        return web.Response()
