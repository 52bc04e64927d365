"""Spans of a prompt: which message each token belongs to.

Found by rendering ever longer beginnings of the conversation: where such a rendering is a beginning
of the whole, its end is the message's end. Templates that look ahead (dropping reasoning from the
history) break that for some messages; what lies between two ends that hold is then `unknown`. What
the template writes before the first message belongs to it; what it adds for the model to begin with
is `unknown`, of the turn to come.
"""

from typing import Any

from producer.template import Encoded, Template, TemplateRefusedError
from storage.sample import Kind, Span

KINDS = {
    "system": Kind.SYSTEM,
    "developer": Kind.SYSTEM,
    "user": Kind.USER,
    "tool": Kind.TOOL,
    "function": Kind.TOOL,
    "assistant": Kind.KEPT,
}


def one_turn_spans(
    template: Template, message: dict[str, Any], text: str, ids: list[int]
) -> tuple[Span, ...] | None:
    """The spans of a prompt of one message, without asking for positions; None when these are needed.

    Ids that end with those of what the template adds for the model to begin with spell just that.
    """
    added = template.generation_prompt([message])
    if added is None or not text.endswith(added):
        return None
    tail = template.ids_of(added)
    end = len(ids) - len(tail)
    if end <= 0 or ids[end:] != tail:
        return None
    spans = (Span(start=0, end=end, turn=0, kind=KINDS[message["role"]]),)
    return (*spans, Span(start=end, end=len(ids), turn=1, kind=Kind.UNKNOWN)) if tail else spans


def message_ends(template: Template, messages: list[dict[str, Any]], text: str) -> list[int | None]:
    """For each message the character of `text` at which it ends; None where that cannot be told."""
    ends: list[int | None] = []
    for count in range(1, len(messages)):
        try:
            beginning = template.render(messages[:count], for_answer=False)
        except TemplateRefusedError:  # some insist on how a conversation may end
            ends.append(None)
            continue
        ends.append(len(beginning) if text.startswith(beginning) else None)
    added = template.generation_prompt(messages)
    ends.append(len(text) - len(added) if added is not None and text.endswith(added) else None)
    return ends


def prompt_spans(
    messages: list[dict[str, Any]], ends: list[int | None], encoded: Encoded, index: int, total: int
) -> tuple[Span, ...]:
    """The spans of text number `index` of the batch, `total` tokens long: gap-free and in order."""
    spans: list[Span] = []
    start, first = 0, 0
    for turn, end in enumerate(ends):
        token = None if end is None else encoded.token_at(index, end)
        if end is not None and token is None and turn == len(ends) - 1:
            token = total if encoded.encodings is not None else None
        if token is None or token < start:
            continue
        if token > start:
            kind = KINDS[messages[turn]["role"]] if first == turn else Kind.UNKNOWN
            spans.append(Span(start=start, end=token, turn=first, kind=kind))
        start, first = token, turn + 1
    if start < total:
        turn = first if first < len(messages) else len(messages)
        spans.append(Span(start=start, end=total, turn=turn, kind=Kind.UNKNOWN))
    return tuple(spans)
