"""Copies states from a server's spool into ours over HTTP, a block at a time, checking everything.

When this is done is in `passing.py`; the server's side is `workers/plugin/offering.py`. A block is
written and looked at in a thread, so that the loop of a hundred calls goes on meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from storage.errors import EyasError, UnavailableError
from storage.sample import SpoolRef
from storage.spool import NOT_LOOKED, Spool, ValueCheck, check_values
from storage.spool_file import HEADER_BYTES, SpoolWriter, read_header
from workers.plugin.offering import PATH
from workers.sglang import checks
from workers.sglang.client import SGLangClient
from workers.sglang.outcomes import AGAIN, Backoff, CallError, ServerAwayError

P = ParamSpec("P")
T = TypeVar("T")

BLOCK_BYTES = 1 << 20
"""What a fetch holds of a tensor at once: some hundred may run in a process."""
TRIES = 3
"""A response that took an hour to generate is not given up with a connection."""
DEADLINE_S = 600.0
"""Longest copy: 2.5 MB a second for a large sample of 1.5 GB."""
DELETE_S = 2.0
"""A file that is not deleted in this time is left to the server's sweep: SIGTERM waits for us."""


async def fetch(
    client: SGLangClient, url: str, ref: SpoolRef, spool: Spool, name: str, pause: Backoff = AGAIN
) -> SpoolRef:
    """The tensor in our spool under `name`, every value checked; the server's file stays.

    Raises `CallError` when it could not be had whole or its values are not good, `FullError` when
    our spool has no room, `ServerAwayError` when the server has no such route. No file is left then.
    """
    failures = 0
    while True:
        try:
            return await _copy(client, url, ref, spool, name)
        except CallError as error:
            if error.code in ("server.not_found", "server.refused"):
                raise not_offered(url, ref.node) from None
            failures += 1
            if error.code not in ("server.broke", "states.lost") or failures >= TRIES:
                raise
        await asyncio.sleep(pause.pause_s(failures))


async def delete(client: SGLangClient, url: str, name: str) -> None:
    """Free the room on the server, if it answers soon; what cannot be deleted it sweeps itself."""
    with suppress(EyasError, TimeoutError):
        async with asyncio.timeout(DELETE_S):
            async with client.stream("DELETE", url, PATH + name, deadline_s=DEADLINE_S):
                pass


def not_offered(url: str, node: str) -> ServerAwayError:
    """The error for states that cannot come here in any way."""
    return ServerAwayError(
        f"{url} writes states to the spool of node `{node}`, which neither this process nor a living sink "
        "shares, and does not hand them out over HTTP",
        code="server.other_spool",
        hint=f"start a sink with `EYAS_NODE={node}` and the server's EYAS_SPOOL_DIR; or give the server's "
        "own address, not a router's, and install this version of the plugin there",
    )


async def _copy(client: SGLangClient, url: str, ref: SpoolRef, spool: Spool, name: str) -> SpoolRef:
    t, layers, hidden = ref.shape
    rows = max(1, min(t, BLOCK_BYTES // (layers * hidden * 2)))
    buffer = np.empty((rows, layers, hidden), np.uint16)
    values = NOT_LOOKED
    with await _begin(spool, name, ref) as writer:
        async with client.stream("GET", url, PATH + ref.name, deadline_s=DEADLINE_S) as response:
            body = _Body(response.aiter_raw(), ref.name)
            header = bytearray(HEADER_BYTES)
            await body.readinto(memoryview(header))
            if read_header(bytes(header)) != (ref.shape, ref.crc32):
                raise _lost(ref.name, "holds another tensor")
            for start in range(0, t, rows):
                block = buffer[: min(rows, t - start)]
                await body.readinto(block.reshape(-1).view(np.uint8).data)
                values += await asyncio.to_thread(_ours, _take, writer, block)
            await body.end()
        if writer.crc32 != ref.crc32:
            raise _lost(ref.name, "does not match its checksum")
        checks.check_values(values)
        return await asyncio.to_thread(_ours, writer.commit)


async def _begin(spool: Spool, name: str, ref: SpoolRef) -> SpoolWriter:
    """A writer of this tensor; cancelled, it leaves none: the thread that makes it is not cancelled too."""
    making = asyncio.ensure_future(asyncio.to_thread(_ours, spool.writer, name, ref.shape))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_forget)
        raise


def _forget(made: "asyncio.Future[SpoolWriter]") -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().abort()


def _ours(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What this work in our spool returns."""
    try:
        return work(*args, **kwargs)
    except UnavailableError as error:
        raise OSError(error.message) from None  # this machine is at fault, no sample: the lane pauses


def _take(writer: SpoolWriter, block: NDArray[np.uint16]) -> ValueCheck:
    """Write a block and look at its values."""
    writer.write(block)
    return check_values(block)


class _Body:
    """A body that is read into buffers of the caller."""

    def __init__(self, chunks: AsyncIterator[bytes], name: str) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")
        self._name = name

    async def readinto(self, target: memoryview) -> None:
        """Fill the target; raises `CallError` when the body ends before."""
        while target:
            if not self._rest:
                data: bytes = await anext(self._chunks, b"")
                if not data:
                    raise _lost(self._name, "ends early")
                self._rest = memoryview(data)
            count = min(len(target), len(self._rest))
            target[:count] = self._rest[:count]
            target, self._rest = target[count:], self._rest[count:]

    async def end(self) -> None:
        """Raises `CallError` unless this was all."""
        more: bytes = await anext(self._chunks, b"")
        if self._rest or more:
            raise _lost(self._name, "is longer than its tensor")


def _lost(name: str, why: str) -> CallError:
    return CallError(f"the server's spool file `{name}`: {why}", code="states.lost")
