"""What one attempt needs, and how it gets its hidden states, by the plugin's spool or a stock reply.

The two kinds of attempt are in `generating.py` and `capturing.py`; attempts are counted in
`execute.py`.
"""

import asyncio
import errno
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from storage.errors import FullError
from storage.run import CaptureSpec
from storage.sample import States
from storage.spool import Spool, spool_name
from storage.spool_file import file_bytes
from workers.broker.messages import Capture, Generate
from workers.runs import RunView
from workers.sglang.checks import check_reply, check_states, check_values, check_weights
from workers.sglang.client import SGLangClient
from workers.sglang.decode import DecodeJob
from workers.sglang.decoding import DecodePool
from workers.sglang.facts import ServerFacts
from workers.sglang.fetching import delete, fetch, not_offered
from workers.sglang.outcomes import AGAIN, BUSY, Backoff, CallError, ServerAwayError
from workers.sglang.passing import Passing, Way, name_there
from workers.sglang.reply import RepliedStates, Reply
from workers.sglang.requests import asking_states

if TYPE_CHECKING:
    from workers.sglang.audit.auditor import Auditor

GENERATE_DEADLINES_S: Mapping[str, float] = {"short": 3600.0, "long": 7200.0}
"""Lane → longest generating call: about three times its token limit at 8 tokens a second, what one
of 150 requests gets from a busy server. A server that hangs is found long before, by `servers.py`."""
CAPTURE_DEADLINE_S = 900.0
"""Longest capturing call: one prefill, a queue of some dozens before it, and a reply in JSON."""
FLOAT_TEXT_BYTES = 26
"""Most bytes of one value in a reply: a double's longest text and a comma."""
REPLY_TEXT_BYTES = 64 << 20
"""Room for everything in a reply beside its states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the orders of a lane process share."""

    client: SGLangClient
    spool: Spool
    decoders: DecodePool
    view: RunView
    """The run as it was when the order was taken."""
    facts: Mapping[str, ServerFacts]
    """Address → what the server said when it was connected to: `ServerPool.facts`."""
    passing: Passing = field(default_factory=Passing)
    """How states of servers with the plugin come here: one for the process."""
    again: Backoff = AGAIN
    """Pauses between counted attempts; tests hurry."""
    busy: Backoff = BUSY
    """Pauses while a server says that it is busy."""
    auditor: "Auditor | None" = None
    """Checks a few of the samples; None checks none."""

    def facts_of(self, url: str) -> ServerFacts:
        """Raises `ServerAwayError` when the server is not connected to any more."""
        facts = self.facts.get(url)
        if facts is None:
            raise ServerAwayError(f"{url} is not connected", code="server.unreachable")
        return facts

    def vocab_size(self, url: str) -> int:
        """Ids must be below this, going out and coming in."""
        served = self.facts_of(url).vocab_size
        known = self.view.run.spec.vocab_size
        return known if served is None else min(known, served)


async def ask(
    body: dict[str, Any], url: str, context: Context, *, deadline_s: float, max_new_tokens: int
) -> Reply:
    """The checked reply to a request without states."""
    reply = await context.client.generate(url, body, deadline_s=deadline_s)
    _check(reply, body, url, context, max_new_tokens)
    return reply


async def ask_with_states(
    body: dict[str, Any],
    url: str,
    context: Context,
    *,
    prompt_id: bytes,
    capture: CaptureSpec,
    deadline_s: float,
    max_new_tokens: int,
) -> tuple[Reply, RepliedStates]:
    """The checked reply to a request, and its checked states in the spool.

    Rows are those of the prompt and of every output token but the last. Unless it returns, no
    file is left.
    """
    facts = context.facts_of(url)
    rows = len(body["input_ids"]) - 1
    await asyncio.to_thread(
        _check_room, context.spool, (rows + 1, len(capture.hs_indices), capture.hidden_size)
    )
    name = spool_name(prompt_id)

    def checked(reply: Reply, name: str) -> RepliedStates:
        _check(reply, body, url, context, max_new_tokens)
        return check_states(reply.states, name=name, rows=rows + len(reply.tokens), capture=capture)

    with ExitStack() as cleanup:
        # Also what a cancelled call's server wrote after all, where it shares this folder.
        cleanup.callback((context.spool.folder / name).unlink, missing_ok=True)
        if facts.plugin is not None:
            reply, states = await _ask_plugin(
                body, url, context, name, facts.plugin.node, capture, deadline_s, checked
            )
        else:
            asked = asking_states(body, capture=capture, spool_name=None)
            reply = await _ask_stock(asked, url, context, name, capture, deadline_s, max_new_tokens)
            states = checked(reply, name)
        cleanup.pop_all()
        return reply, states


async def _ask_plugin(
    body: dict[str, Any],
    url: str,
    context: Context,
    name: str,
    node: str,
    capture: CaptureSpec,
    deadline_s: float,
    checked: Callable[[Reply, str], RepliedStates],
) -> tuple[Reply, RepliedStates]:
    """The reply of a server with the plugin, its states in a spool that a sink reads."""
    own = context.spool.node
    way = context.passing.way(url, node, own)
    there = name_there(name, way)
    asked = asking_states(body, capture=capture, spool_name=there)
    try:
        reply = await context.client.generate(url, asked, deadline_s=deadline_s)
        states = checked(reply, there)
        if states.ref.node != node:  # a data-parallel rank on another machine than the one that answers
            way = context.passing.way(url, states.ref.node, own)
            if way is Way.HTTP:
                raise not_offered(url, states.ref.node)
        if way is Way.FOLDER:
            check_values(await asyncio.to_thread(context.spool.check_values, states.ref))
        elif way is Way.HTTP:
            ref = await fetch(context.client, url, states.ref, context.spool, name, context.again)
            states = replace(states, ref=ref)
        # Way.SINK: that spool cannot be seen from here; its own sink reads every byte of it.
    except ServerAwayError:
        raise  # nobody is there to be told
    except BaseException:
        if way is not Way.FOLDER:
            await delete(context.client, url, there)
        raise
    if way is Way.HTTP:
        await delete(context.client, url, there)
    return reply, states


def stored_states(
    states: RepliedStates, order: Generate | Capture, digest: bytes, capture: CaptureSpec, facts: ServerFacts
) -> States:
    """The states as a result names them."""
    return States(
        id=order.id,
        digest=digest,
        dataset=order.dataset,
        capture=capture.name,
        spool=states.ref,
        facts_id=facts.facts_id,
        hs_indices=states.hs_indices,
        norm=states.norm,
    )


async def _ask_stock(
    body: dict[str, Any],
    url: str,
    context: Context,
    name: str,
    capture: CaptureSpec,
    deadline_s: float,
    max_new_tokens: int,
) -> Reply:
    """The reply of a stock server, its states moved from JSON into the spool by another process."""
    prompt_tokens = len(body["input_ids"])
    values = (prompt_tokens + max_new_tokens) * len(capture.hs_indices) * capture.hidden_size
    # Named so that the spool counts it as used and sweeps it when this process dies.
    path = context.spool.folder / f".{name}.json.part"
    try:
        await context.client.generate_to_file(
            url, body, path, max_bytes=REPLY_TEXT_BYTES + values * FLOAT_TEXT_BYTES, deadline_s=deadline_s
        )
        job = DecodeJob(
            body=str(path),
            name=name,
            prompt_tokens=prompt_tokens,
            hs_indices=capture.hs_indices,
            norm=capture.norm,
            hidden_size=capture.hidden_size,
            chunked_prefill_size=context.facts_of(url).chunked_prefill_size,
        )
        return await context.decoders.decode(job)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullError(
                f"no room for a reply in the spool `{context.spool.folder}`", code="spool.full"
            ) from None
        raise
    finally:
        path.unlink(missing_ok=True)


def _check(reply: Reply, body: dict[str, Any], url: str, context: Context, max_new_tokens: int) -> None:
    check_reply(
        reply,
        rid=body["rid"],
        sent_tokens=len(body["input_ids"]),
        max_new_tokens=max_new_tokens,
        vocab_size=context.vocab_size(url),
    )
    check_weights(reply, expected=context.facts_of(url).weight_version)


def _check_room(spool: Spool, shape: tuple[int, int, int]) -> None:
    """Before a request: `CallError` when its states never fit, `FullError` when they do not fit now.

    `shape` is that of the fewest rows they can have.
    """
    if (size_bytes := file_bytes(shape)) > spool.max_bytes:
        raise CallError(
            f"`{shape[0]}` rows of states take `{size_bytes}` bytes, the spool `{spool.folder}` of node "
            f"`{spool.node}` has `{spool.max_bytes}`: raise EYAS_SPOOL_MAX_GB there, then `producer retry "
            "--code states.too_big`",
            code="states.too_big",
        )
    if spool.used_bytes() >= spool.max_bytes:
        raise FullError(f"the spool `{spool.folder}` is full", code="spool.full")
