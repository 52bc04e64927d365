"""aiohttp under httpx: its connections, and what its errors mean.

httpx's own transport costs 25 to 40 times the CPU at 150 calls in flight (`ops/bench/client.py`). It
sends nothing (`client.py`) and knows no status of an answer (`http_errors.py`).
"""

import re

import aiohttp
import httpx

from workers.sglang.outcomes import ServerAwayError

KEEPALIVE_S = 3.0
"""Idle connections are dropped before SGLang's server drops them (5 s), which would look like its death."""

NEVER_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""What aiohttp raises before a request is sent: no host, refused, not accepted."""

BROKEN = (httpx.RequestError, aiohttp.ClientError)
"""What may be raised in a call. The transport has no name of httpx's for an answer that is not HTTP
and lets aiohttp's own through."""


def session() -> aiohttp.ClientSession:
    """Without aiohttp's own limit of 100 connections, which would queue calls that hold a slot."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


def never_connected(error: Exception) -> bool:
    """Whether the request was not even sent.

    The transport has one name for "refused" and "dropped in mid-call": its cause tells.
    """
    return isinstance(error.__cause__, NEVER_CONNECTED)


def unreachable(url: str, error: Exception) -> ServerAwayError:
    """What such an error means: no server is there."""
    return ServerAwayError(
        f"no server answers at {url}: {said(error)}",
        code="server.unreachable",
        hint="start it, or give its address with `--server-url`; without a GPU: `producer up --engine`",
    )


def said(error: Exception) -> str:
    """The error in a few words, without the address."""
    # aiohttp says the address again, and `ssl:default` even where there is none
    why = re.sub(r"^Cannot connect to host \S+ ssl:\S+ \[(.+)\]$", r"\1", str(error))
    return why[:200] or type(error).__name__
