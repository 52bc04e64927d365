"""One order, from its message to its result: attempts are counted here, and nothing is queued.

`execute` knows no Celery and no Redis. One attempt is in `generating.py` and `capturing.py`, what
follows from its failure in the table of `outcomes.py`.
"""

import asyncio
import time

from storage.errors import SpoolLostError, UnsuitableError
from storage.sample import Failure, Stage
from workers.broker.messages import Capture, Failed, Generate, Result
from workers.sglang.attempt import Context
from workers.sglang.capturing import capture_once
from workers.sglang.generating import generate_once
from workers.sglang.outcomes import (
    ATTEMPTS,
    BUSY_PATIENCE_S,
    CallError,
    Outcome,
    ServerAwayError,
    outcome,
)
from workers.sglang.reply import printable

SAID_CHARACTERS = 500
"""Longest message of a dead letter."""


async def execute(order: Generate | Capture, url: str, context: Context) -> Result:
    """The order's result: a response, states, or a dead letter after k failures on a living server.

    Raises `ServerAwayError` when the server takes no calls now: the order belongs back in the
    queue; `FullError` when a spool has no room: likewise, and capturing pauses; and
    `StaleOrderError` when nobody wants the result any more. Cancelled, it aborts the request on
    the server and leaves no file.
    """
    failures = busy = 0
    busy_since = 0.0
    while True:
        try:
            match order:
                case Generate():
                    return await generate_once(order, url, context, attempt=failures + 1)
                case Capture():
                    return await capture_once(order, url, context)
        except SpoolLostError as lost:
            if lost.code == "spool.missing":
                # Wiped, or never there: nothing is wrong with the sample, and connecting again tells which.
                raise ServerAwayError(f"{url}: {lost.message}", code="server.other_spool") from None
            error = CallError(lost.message, code="states.lost")
        except CallError as failed:
            error = failed
        match outcome(error):
            case Outcome.WAIT:
                now = time.monotonic()
                busy, busy_since = busy + 1, busy_since or now
                if now - busy_since > BUSY_PATIENCE_S:
                    raise ServerAwayError(error.message, code=error.code)
                await asyncio.sleep(context.busy.pause_s(busy))
            case Outcome.ELSEWHERE:
                # Behind a proxy, its answer is all that is seen of a server that this call killed.
                killed = error.code == "server.gateway"
                raise ServerAwayError(error.message, code=error.code, in_flight=killed)
            case Outcome.DEAD:
                if error.code == "server.refused":
                    await _check_unchanged(url, context, error)
                return dead_letter(order, code=error.code, said=error.message, attempts=failures + 1)
            case Outcome.AGAIN:
                failures += 1
                busy, busy_since = 0, 0.0
                if failures >= ATTEMPTS:
                    return dead_letter(order, code=error.code, said=error.message, attempts=failures)
                await asyncio.sleep(context.again.pause_s(failures))


async def _check_unchanged(url: str, context: Context, error: CallError) -> None:
    """Raises `ServerAwayError` when the server that refuses is no longer the one we connected to.

    Restarted with other flags it would refuse every prompt, and every one would be a dead letter.
    """
    try:
        facts = await context.client.facts(url)
    except UnsuitableError as changed:
        raise ServerAwayError(changed.message, code="server.changed") from None
    if facts.facts_id != context.facts_of(url).facts_id:
        raise ServerAwayError(error.message, code="server.changed")


def dead_letter(order: Generate | Capture, *, code: str, said: str, attempts: int) -> Failed:
    """The result of an order that cannot be carried out."""
    generates = isinstance(order, Generate)
    failure = Failure(
        id=order.id,
        digest=None if isinstance(order, Generate) else order.digest,
        capture=None if isinstance(order, Generate) else order.capture,
        dataset=order.dataset,
        stage=Stage.GENERATE if generates else Stage.CAPTURE,
        attempts=attempts,
        retry=order.retry,
        code=code,
        # A server's words may be in it: what UTF-8 cannot say could not be sent, and the order
        # would be run again for ever.
        message=printable(said[:SAID_CHARACTERS]),
    )
    return Failed(run=order.run, failure=failure)
