"""Adds the spool's route to SGLang's web application: what each request is answered. Starlette's side.

Which files there are is in `offering.py`. The key of `--api-key` is asked for as before `/generate`,
since SGLang's check stands before every route.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, BinaryIO

from storage.errors import SpoolLostError
from workers.plugin.offering import CHUNK_BYTES, GONE, PATH, Offered


def add_route(app: Any, offered: Offered) -> None:
    """Answer GET and DELETE of `/eyas/spool/<name>`; nothing happens when the application does already."""
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    path = PATH + "{name}"
    if any(getattr(route, "path", None) == path for route in app.router.routes):
        return

    async def get(request: Any) -> Any:
        try:
            file, size = await asyncio.to_thread(offered.open, request.path_params["name"])
        except SpoolLostError as error:
            return JSONResponse({"error": error.message}, GONE)
        return StreamingResponse(
            chunks(file),
            media_type="application/octet-stream",
            headers={"Content-Length": str(size)},
        )

    async def delete(request: Any) -> Any:
        await asyncio.to_thread(offered.delete, request.path_params["name"])
        return Response(status_code=204)

    app.router.routes.append(Route(path, get, methods=["GET"]))
    app.router.routes.append(Route(path, delete, methods=["DELETE"]))


async def chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    """The file's bytes, few at a time; it is closed when they end or are no longer wanted."""
    try:
        while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield data
    finally:
        file.close()
