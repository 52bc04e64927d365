"""Spans of a prompt: which message each token belongs to.

Found by rendering ever longer beginnings of the conversation: where such a rendering is a beginning
of the whole, its end is the message's end. Templates that look ahead (dropping reasoning from the
history) break that for some messages; what lies between two ends that hold is then `unknown`. What
the template writes before the first message belongs to it; what it adds for the model to begin with
is `unknown`, of the turn to come.
"""

from typing import Any

from producer.datasets.template import Encoded, Template, TemplateRefusedError
from storage.sample import Kind, Span

CHARACTERS = 500_000_000
"""Rendered at most to find the messages' ends, each beginning anew: some seconds. A conversation of more
has none that are known."""
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
    if len(messages) * len(text) > CHARACTERS:
        return [None] * len(messages)
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


def tokens_before(template: Template, encoded: Encoded, index: int, text: str, char: int) -> int | None:
    """How many tokens of `text`, number `index` of the batch, come before this character.

    A tokenizer written in Python gives no positions: there the beginning is encoded by itself, and
    counts if its ids are the first ones of the whole. None when it cannot be told.
    """
    if encoded.encodings is not None:
        return len(encoded.ids[index]) if char == len(text) else encoded.token_at(index, char)
    beginning = template.encode([text[:char]]).ids[0]
    return len(beginning) if encoded.ids[index][: len(beginning)] == beginning else None


def prompt_spans(messages: list[dict[str, Any]], ends: list[int | None], total: int) -> tuple[Span, ...]:
    """The spans of a prompt of `total` tokens: gap-free and in order.

    `ends` says of each message how many tokens come before its end, None where nobody knows.
    """
    spans: list[Span] = []
    start, first = 0, 0
    for turn, end in enumerate(ends):
        if end is None or end < start:
            continue
        if end > start:
            kind = KINDS[messages[turn]["role"]] if first == turn else Kind.UNKNOWN
            spans.append(Span(start=start, end=end, turn=first, kind=kind))
        start, first = end, turn + 1
    if start < total:
        spans.append(Span(start=start, end=total, turn=first, kind=Kind.UNKNOWN))
    return tuple(spans)
