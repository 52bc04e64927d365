"""States where this process can read them: in its own spool, or a copy of them for as long as it looks.

Only what is checked is copied so. How states pass otherwise is in `workers/sglang/passing.py`.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage.sample import SpoolRef
from storage.spool import spool_name
from storage.tokens import ID_BYTES
from workers.sglang.attempt import Context
from workers.sglang.fetching import delete, fetch


@asynccontextmanager
async def at_hand(ref: SpoolRef, url: str, context: Context) -> AsyncIterator[SpoolRef]:
    """The states in this process's spool.

    Raises what `fetch` does when they lie in the server's and cannot be had.
    """
    if ref.node == context.spool.node:
        yield ref
        return
    name = spool_name(secrets.token_bytes(ID_BYTES))
    copy = await fetch(context.client, url, ref, context.spool, name, context.again)
    try:
        yield copy
    finally:
        context.spool.delete(copy)


async def discard(ref: SpoolRef, url: str, context: Context) -> None:
    """Free the room of states that nobody will be told of, wherever they lie."""
    if ref.node == context.spool.node:
        context.spool.delete(ref)
    else:
        await delete(context.client, url, ref.name)
