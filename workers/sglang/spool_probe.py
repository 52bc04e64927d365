"""Whether a server with the plugin writes where this process reads: asked before its first call.

Two processes of one node that name different spool folders would make every sample fail, one
after the other, on a server that is well.
"""

import asyncio

from storage.errors import FullError, SpoolLostError, UnsuitableError
from storage.run import CaptureSpec
from storage.spool import Spool, spool_name
from storage.tokens import ID_BYTES, as_tokens
from workers.sglang.client import PROBE_S, SGLangClient
from workers.sglang.facts import ServerFacts
from workers.sglang.outcomes import CallError, ServerAwayError
from workers.sglang.requests import asking_states, capture_body


async def probe_spool(
    client: SGLangClient, url: str, facts: ServerFacts, capture: CaptureSpec | None, spool: Spool
) -> None:
    """Returns when states of two tokens came through the spool, or none are to come this way.

    A spool without room proves nothing and passes: calls wait for room themselves. Raises
    `UnsuitableError` when the file is not in our spool, `ServerAwayError` when the call failed.
    """
    if capture is None or facts.plugin is None or facts.plugin.node != spool.node:
        return
    name = spool_name(bytes(ID_BYTES))
    body = asking_states(capture_body(as_tokens([1, 2])), capture=capture, spool_name=name)
    try:
        reply = await client.generate(url, body, deadline_s=PROBE_S)
        if reply.states is None:
            raise ServerAwayError(f"{url}: the probe got no hidden states", code="states.missing")
        await asyncio.to_thread(spool.check_values, reply.states.ref)
    except SpoolLostError as error:
        raise other_spool(url, spool, error) from None
    except FullError:
        return
    except CallError as error:
        if error.code != "server.slow":  # else it waited its whole deadline behind other requests
            raise ServerAwayError(f"{url}: the probe got: {error.message}", code=error.code) from None
    finally:
        (spool.folder / name).unlink(missing_ok=True)


def other_spool(url: str, spool: Spool, error: SpoolLostError) -> UnsuitableError:
    """What a file that the server names and our spool lacks means."""
    return UnsuitableError(
        f"{url} writes states elsewhere than in `{spool.folder}` of node `{spool.node}`: {error.message}",
        code="server.other_spool",
        hint="start server, lanes and sink of a node with the same EYAS_SPOOL_DIR",
    )
