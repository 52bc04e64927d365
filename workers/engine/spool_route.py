"""The plugin's spool route on aiohttp: files of the spool over HTTP, for lanes that do not share its folder.

Which files there are is in `workers/plugin/offering.py`.
"""

import asyncio

from aiohttp import web

from storage.errors import SpoolLostError
from workers.plugin.offering import CHUNK_BYTES, GONE, PATH, Offered


def add_route(app: web.Application, offered: Offered) -> None:
    """Answer GET and DELETE of `/eyas/spool/<name>`."""

    async def get(request: web.Request) -> web.StreamResponse:
        try:
            file, size = await asyncio.to_thread(offered.open, request.match_info["name"])
        except SpoolLostError as error:
            return web.json_response({"error": error.message}, status=GONE)
        with file:
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            response.content_length = size
            await response.prepare(request)
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                await response.write(data)
            await response.write_eof()
        return response

    async def delete(request: web.Request) -> web.Response:
        await asyncio.to_thread(offered.delete, request.match_info["name"])
        return web.Response(status=204)

    app.router.add_get(PATH + "{name}", get, allow_head=False)
    app.router.add_delete(PATH + "{name}", delete)
