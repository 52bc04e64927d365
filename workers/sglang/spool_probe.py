"""How states of a server with the plugin get here: found out by two tokens before its first call.

One that writes where nobody here reads would make every sample fail, one after the other, on a server
that is well. Two processes of one node may name different folders, as those of two containers do.
"""

import asyncio

from storage.errors import FullError, SpoolLostError, UnsuitableError
from storage.run import CaptureSpec
from storage.spool import Spool, spool_name
from storage.tokens import ID_BYTES, as_tokens
from workers.sglang.checks import check_values
from workers.sglang.client import PROBE_S, SGLangClient
from workers.sglang.facts import ServerFacts
from workers.sglang.fetching import delete, fetch
from workers.sglang.outcomes import CallError, ServerAwayError
from workers.sglang.passing import Passing, Way, name_there
from workers.sglang.reply import RepliedStates
from workers.sglang.requests import asking_states, capture_body


async def probe_spool(
    client: SGLangClient,
    url: str,
    facts: ServerFacts,
    capture: CaptureSpec | None,
    spool: Spool,
    passing: Passing,
) -> None:
    """Returns when states of two tokens came here, or none are to come, and `passing` knows how.

    A spool without room proves nothing and passes: calls wait for room themselves. Raises
    `UnsuitableError` when they cannot come in any way, `ServerAwayError` when the call failed.
    """
    if capture is None or facts.plugin is None:
        return
    passing.found(url, apart=False)  # it may have been restarted with our folder
    way = passing.way(url, facts.plugin.node, spool.node)
    if way is Way.SINK:
        return  # it cannot be seen from here; what that sink finds lost is captured again
    name = spool_name(bytes(ID_BYTES))
    there = name_there(name, way)
    body = asking_states(capture_body(as_tokens([1, 2])), capture=capture, spool_name=there)
    try:
        reply = await client.generate(url, body, deadline_s=PROBE_S)
        if reply.states is None:
            raise ServerAwayError(f"{url}: the probe got no hidden states", code="states.missing")
        await _receive(client, url, reply.states, spool, name, passing, way)
    except FullError:
        return
    except CallError as error:
        if error.code != "server.slow":  # else it waited its whole deadline behind other requests
            raise ServerAwayError(f"{url}: the probe got: {error.message}", code=error.code) from None
    except ServerAwayError as error:
        if error.code != "server.other_spool":
            raise
        raise UnsuitableError(error.message, code=error.code, hint=error.hint) from None
    finally:
        (spool.folder / name).unlink(missing_ok=True)
        if passing.way(url, facts.plugin.node, spool.node) is Way.HTTP:
            await delete(client, url, there)


async def _receive(
    client: SGLangClient,
    url: str,
    states: RepliedStates,
    spool: Spool,
    name: str,
    passing: Passing,
    way: Way,
) -> None:
    """Look for the states in our folder, then where the server offers them."""
    if way is Way.FOLDER:
        try:
            check_values(await asyncio.to_thread(spool.check_values, states.ref))
            return
        except SpoolLostError as error:
            if error.code != "spool.missing":
                raise CallError(error.message, code="states.lost") from None
            passing.found(url, apart=True)
    await fetch(client, url, states.ref, spool, name)
