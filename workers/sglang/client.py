"""The HTTP client of SGLang: facts, a one-token probe, generate. It sends once and never retries.

What it goes through is in `transport.py`; what follows from an error, in `outcomes.py`; what a request
holds, in `requests.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from httpx_aiohttp import AiohttpTransport

from storage.errors import FullError, UnsuitableError
from storage.json_records import parse_json
from storage.run import CaptureSpec, Sampling
from workers.sglang.facts import ServerFacts, read_facts
from workers.sglang.http_errors import error_message, refusal
from workers.sglang.outcomes import CallError, ServerAwayError
from workers.sglang.reply import Reply, read_reply
from workers.sglang.requests import probe_body
from workers.sglang.transport import BROKEN, never_connected, said, session, unreachable

CONNECT_S = 5.0
"""A host that does not accept in this time is away."""
ASK_S = 15.0
"""Deadline of a question that costs the server nothing: facts, `/ready`."""
PROBE_S = 60.0
"""Deadline of one token: it waits behind whatever the server is doing."""
ERROR_BYTES = 65_536
"""Read of an error's body, at most."""
REPLY_BYTES = 64 << 20
"""A reply without states is smaller, or garbage."""

Body = Mapping[str, Any]
"""A request to `/generate`."""


class SGLangClient:
    """Calls to any number of servers from one event loop.

    Every method raises `ServerAwayError` when the server cannot be reached. An async context
    manager, to be opened and closed on the loop that uses it.
    """

    def __init__(self, api_key: str | None = None) -> None:
        # A compressed reply could grow past every bound before it is counted.
        headers = {"Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            transport=AiohttpTransport(client=session),
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop every connection; calls still running fail."""
        await self._http.aclose()

    async def facts(self, url: str) -> ServerFacts:
        """What the server says of itself.

        Raises `UnsuitableError` when what answers is no SGLang or does not take the key.
        """
        info = await self._ask(url, "/server_info", "/get_server_info")
        model = await self._ask(url, "/model_info", "/get_model_info")
        models = {} if info.get("context_length") else await self._ask(url, "/v1/models", needed=False)
        try:
            return read_facts(info, model, models)
        except UnsuitableError as error:
            raise UnsuitableError(f"{url}: {error.message}", code=error.code, hint=error.hint) from None

    async def loads(self, url: str) -> Mapping[str, Any]:
        """What the server says of its load; empty when it does not."""
        return await self._ask(url, "/v1/loads?include=core", needed=False)

    async def probe(
        self,
        url: str,
        *,
        sampling: Sampling | None = None,
        capture: CaptureSpec | None = None,
        deadline_s: float = PROBE_S,
    ) -> None:
        """Returns when the server has generated one token: what no health route proves.

        With `capture` it asks a stock server for states as well. Raises `UnsuitableError` when it
        refuses to sample in this way, or its rows are not as wide as the capture's.
        """
        body = probe_body(sampling or Sampling(), states=capture is not None)
        try:
            decoded = await self._generate(url, body, deadline_s)
            if capture is None:
                read_reply(decoded)
                return
            width = len(decoded["meta_info"]["hidden_states"][0][0])
        except (CallError, FullError) as error:
            if error.code == "server.slow":
                return  # it waited its whole deadline in the queue of a server that is full and lives
            if error.code == "server.refused":
                raise UnsuitableError(
                    f"{url} refuses what the run asks: {error.message}",
                    code=error.code,
                    hint="its values are in `run.json` under `sampling`; begin another run with others",
                ) from None
            raise ServerAwayError(f"{url}: the probe got: {error.message}", code=error.code) from None
        except (KeyError, TypeError, IndexError) as error:
            message = f"{url}: the probe got no hidden states: {error!r}"
            raise ServerAwayError(message, code="states.missing") from None
        wanted = len(capture.hs_indices) * capture.hidden_size
        if width != wanted:
            raise UnsuitableError(
                f"{url} gives rows of `{width}` values; `{capture.name}` is {len(capture.hs_indices)} × "
                f"{capture.hidden_size}",
                code="server.other_layers",
                hint="start it with the layers that the run wants: `--return-aux-hidden-state-layer-ids`",
            )

    async def answers(self, url: str) -> bool:
        """Whether anything answers HTTP there now, draining or not."""
        try:
            async with asyncio.timeout(CONNECT_S), self._http.stream("GET", f"{url}/ready"):
                return True
        except (*BROKEN, TimeoutError, OSError):
            return False

    async def advances(self, url: str, deadline_s: float) -> bool:
        """Whether the server produced any token meanwhile, its own or another's.

        `/health_generate` answers as soon as any request gets a token, so a full server passes
        where a probe would wait in its queue. A server without the route passes.
        """
        try:
            async with asyncio.timeout(deadline_s):
                async with self._http.stream("GET", f"{url}/health_generate") as response:
                    return response.status_code < 500
        except (*BROKEN, TimeoutError, OSError):
            return False

    async def generate(self, url: str, body: Body, *, deadline_s: float) -> Reply:
        """The reply to one request whose states, if any, do not come in it.

        Raises `CallError` when the call or its reply went wrong, `FullError` when the server's
        spool is full. Cancelled, it closes the connection and the server aborts the request.
        """
        return read_reply(await self._generate(url, body, deadline_s))

    async def generate_to_file(
        self, url: str, body: Body, path: Path, *, max_bytes: int, deadline_s: float
    ) -> None:
        """Stream the reply to one request to `path`, unread; raises as `generate` does.

        The caller deletes the file, whatever happens.
        """
        size = 0
        async with self.stream("POST", url, "/generate", deadline_s=deadline_s, body=body) as response:
            with path.open("wb") as file:
                async for chunk in response.aiter_bytes():
                    size += len(chunk)
                    if size > max_bytes:
                        raise CallError(f"the reply is longer than `{max_bytes}` bytes", code="reply.garbage")
                    file.write(chunk)

    async def _generate(self, url: str, body: Body, deadline_s: float) -> Any:
        content = bytearray()
        async with self.stream("POST", url, "/generate", deadline_s=deadline_s, body=body) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > REPLY_BYTES:
                    raise CallError(f"the reply is longer than `{REPLY_BYTES}` bytes", code="reply.garbage")
        try:
            return parse_json(content)
        except ValueError as error:
            raise CallError(f"the reply is not JSON: {error}"[:300], code="reply.garbage") from None

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, path: str, *, deadline_s: float, body: Body | None = None
    ) -> AsyncIterator[httpx.Response]:
        """The answer when it is a success, unread; errors inside the block are told apart too.

        Raises as `generate` does.
        """
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._http.stream(method, url + path, json=body) as response,
            ):
                if not response.is_success:
                    raise refusal(url, response.status_code, await _beginning(response))
                yield response
        except BROKEN as error:
            if never_connected(error):
                raise unreachable(url, error) from None
            # Asked, since the reset of a proxy before a living server counts against the sample.
            if await self.answers(url):
                raise CallError(
                    f"{url}: the connection broke in mid-call: {said(error)}", code="server.broke"
                ) from None
            raise ServerAwayError(
                f"{url}: the connection broke and nothing answers", code="server.died", in_flight=True
            ) from None
        except TimeoutError:
            if await self.advances(url, PROBE_S):
                raise CallError(f"{url}: no reply in `{deadline_s:.0f}` s", code="server.slow") from None
            raise ServerAwayError(
                f"{url}: no reply in `{deadline_s:.0f}` s, and it produces no token",
                code="server.hanging",
                in_flight=True,
            ) from None

    async def _ask(self, url: str, *paths: str, needed: bool = True) -> dict[str, Any]:
        """The JSON object at the first of the paths that exists; empty when none is `needed`."""
        status, content = 404, b""
        try:
            async with asyncio.timeout(ASK_S):
                for path in paths:
                    async with self._http.stream("GET", f"{url}{path}") as response:
                        status, content = response.status_code, await _beginning(response, REPLY_BYTES)
                    if status != 404:
                        break
        except (*BROKEN, TimeoutError) as error:
            raise unreachable(url, error) from None
        if status in (401, 403):
            raise UnsuitableError(
                f"{url} does not take the key",
                code="server.key",
                hint="set EYAS_SERVER_API_KEY to the server's `--api-key`",
            )
        if status >= 500:
            raise ServerAwayError(f"{url}: `{status}` {error_message(content)}", code="server.busy")
        try:
            decoded = parse_json(content) if status == 200 else None
        except ValueError:
            decoded = None
        if isinstance(decoded, dict):
            return decoded
        if not needed:
            return {}
        raise UnsuitableError(
            f"{url} answers `{paths[0]}` with `{status}`: not an SGLang server",
            code="server.not_sglang",
            hint="give the address of an SGLang server with `--server-url`",
        )


async def _beginning(response: httpx.Response, most_bytes: int = ERROR_BYTES) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > most_bytes:
            break
    return bytes(content)
