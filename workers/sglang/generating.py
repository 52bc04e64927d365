"""One attempt at a response, in mode `inline` with its hidden states.

How often it is tried is in `execute.py`.
"""

import numpy as np

from storage.run import StatesMode
from storage.sample import Finish, Kind, Response, Span
from storage.tokens import response_digest
from workers.broker.messages import Generate, Responded
from workers.sglang.attempt import GENERATE_DEADLINES_S, Context, ask, ask_with_states, stored_states
from workers.sglang.audit.auditor import checked
from workers.sglang.checks import check_sendable
from workers.sglang.outcomes import CallError
from workers.sglang.reply import Reply
from workers.sglang.requests import generate_body, sampling_seed


async def generate_once(order: Generate, url: str, context: Context, *, attempt: int) -> Responded:
    """The response to the order's prompt.

    Output is capped so that prompt and response together fit a request that captures them.
    Raises what `outcomes.py` lists, `FullError` and `SpoolLostError`.
    """
    spec, settings, facts = context.view.run.spec, context.view.settings, context.facts_of(url)
    check_sendable(order.prompt, vocab_size=context.vocab_size(url), max_input_tokens=facts.max_input_tokens)
    max_new_tokens = min(order.max_new_tokens, settings.max_input_tokens - len(order.prompt) - 1)
    if max_new_tokens < 1:
        raise CallError(
            f"a prompt of `{len(order.prompt)}` tokens leaves no room in `{settings.max_input_tokens}`",
            code="prompt.long",
        )
    capture = settings.capture if settings.states is StatesMode.INLINE else None
    body = generate_body(
        order.prompt,
        sampling=spec.sampling,
        seed=sampling_seed(order.id, spec.sampling.seed),
        max_new_tokens=max_new_tokens,
        # Prompts share prefixes, so the first attempt uses the cache; a failed one is not trusted.
        fresh_cache=capture is not None or attempt > 1,
    )
    deadline_s = GENERATE_DEADLINES_S.get(order.lane, max(GENERATE_DEADLINES_S.values()))
    if capture is None:
        reply = await ask(body, url, context, deadline_s=deadline_s, max_new_tokens=max_new_tokens)
        return Responded(run=order.run, response=_response(order, reply, attempt, facts.facts_id))
    reply, replied = await ask_with_states(
        body,
        url,
        context,
        prompt_id=order.id,
        capture=capture,
        deadline_s=deadline_s,
        max_new_tokens=max_new_tokens,
    )
    response = _response(order, reply, attempt, facts.facts_id)
    states = stored_states(replied, order, response.digest, capture, facts)
    states = await checked(states, response.tokens, response.prompt_length, url, context)
    return Responded(run=order.run, response=response, states=states)


def _response(order: Generate, reply: Reply, attempt: int, facts_id: str) -> Response:
    tokens = np.concatenate([order.prompt, reply.tokens])
    start = len(order.prompt)
    turn = order.spans[-1].turn + 1 if order.spans else 0
    span = Span(start=start, end=len(tokens), turn=turn, kind=Kind.GENERATED)
    return Response(
        id=order.id,
        digest=response_digest(tokens),
        dataset=order.dataset,
        tokens=tokens,
        prompt_length=start,
        spans=(*order.spans, span),
        text=reply.text,
        finish=Finish(reply.finish),
        cached_tokens=reply.cached_tokens,
        retractions=reply.retractions,
        attempt=attempt,
        timings=reply.timings,
        facts_id=facts_id,
    )
