"""One attempt at the hidden states of a known sequence: one prefill, a row for every token.

How often it is tried is in `execute.py`.
"""

from workers.broker.messages import Capture, Captured
from workers.sglang.attempt import CAPTURE_DEADLINE_S, Context, ask_with_states, stored_states
from workers.sglang.audit.auditor import checked
from workers.sglang.checks import check_sendable
from workers.sglang.outcomes import StaleOrderError
from workers.sglang.requests import capture_body


async def capture_once(order: Capture, url: str, context: Context) -> Captured:
    """The states of prompt and response, in the spool.

    The one token that a prefill must generate is thrown away. Raises what `outcomes.py` lists,
    `FullError`, `SpoolLostError`, and `StaleOrderError` when the run wants another capture now.
    """
    capture, facts = context.view.settings.capture, context.facts_of(url)
    if capture is None or capture.name != order.capture:
        raise StaleOrderError(f"capture `{order.capture}` is not wanted any more", code="order.stale")
    check_sendable(order.tokens, vocab_size=context.vocab_size(url), max_input_tokens=facts.max_input_tokens)
    _, replied = await ask_with_states(
        capture_body(order.tokens),
        url,
        context,
        prompt_id=order.id,
        capture=capture,
        deadline_s=CAPTURE_DEADLINE_S,
        max_new_tokens=1,
    )
    states = stored_states(replied, order, order.digest, capture, facts)
    return Captured(
        run=order.run, states=await checked(states, order.tokens, order.prompt_length, url, context)
    )
