"""Rows to prompts, a batch at a time: parsed, rendered, tokenized, checked, identified.

Pure of the store: `reading.py` keeps what comes from here. Memory holds one batch, whatever the
source's size. Each row that gives no prompt is counted under its reason.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from producer.datasets.forms import Dropped, Given, Reason, Shape, Talk, parse
from producer.datasets.occurrences import Occurrences
from producer.datasets.sources import Row
from producer.datasets.spans import message_ends, one_turn_spans, prompt_spans, tokens_before
from producer.datasets.template import Template, TemplateRefusedError
from storage.sample import Kind, Prompt, Span
from storage.tokens import Tokens, as_tokens

BATCH = 2048
"""Rows parsed and tokenized together, and at most the prompts of one stored segment."""
FEW = 64
"""Rows parsed at least, however few are wanted: some may be ineligible. Twice as many each time none
of them gave a prompt: a source may begin with a million of these, and each batch is a commit."""
SHRINKING = 2
"""Characters that a normalizer may make one of: a letter and its accent."""
IDS = 4_000_000
"""Token ids of a batch, its last row's beside: a tokenized row may hold a hundred thousand of them, and
Python's integers take 36 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a prompt has to keep to."""

    vocab_size: int
    """Every id must be below."""
    max_input_tokens: int | None
    """A request's ids must be fewer, its answer's first token included; None when not known."""
    max_prompts: int | None = None
    """Reading ends with so many."""
    max_tokens: int | None = None
    """Reading ends when the prompts alone reach so many tokens: nothing more could be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row without a prompt, for people."""

    where: str
    """File and line."""
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What some rows in a row gave."""

    prompts: Sequence[Prompt]
    next_row: int
    """Row to go on from."""
    complete: bool
    """Whether the source is at its end."""
    dropped: Mapping[str, int]
    """Reason → rows, of these rows alone."""
    skipped: Sequence[Skipped] = field(default_factory=tuple)


def make_prompts(
    rows: Iterable[Row],
    *,
    dataset: str,
    shape: Shape,
    template: Template,
    limits: Limits,
    seen: Occurrences,
    start: int = 0,
) -> Iterator[Batch]:
    """Prompts of the rows, which begin at number `start`, in order and up to the limits.

    The last batch is the only one that is complete or ends before its rows do.
    """
    source = iter(rows)
    wanted, room, next_row = limits.max_prompts, limits.max_tokens, start
    few = FEW
    while (wanted is None or wanted > 0) and (room is None or room > 0):
        # Rows past the cap would be tokenized for nothing, single rows at a time are slow.
        size = BATCH if wanted is None else min(BATCH, max(few, wanted))
        chunk, at_end = _chunk(source, size, shape.column)
        prompts: list[Prompt] = []
        dropped: Counter[str] = Counter()
        skipped = []
        capped = False
        for row, made in zip(chunk, _make(chunk, shape, template, limits), strict=True):
            next_row = row.number + 1
            if isinstance(made, Dropped):
                dropped[made.reason.value] += 1
                skipped.append(Skipped(where=row.where, reason=made.reason, detail=made.detail))
                continue
            tokens, spans, given_from = made
            prompts.append(
                Prompt(
                    id=seen.next_id(tokens),
                    dataset=dataset,
                    tokens=tokens,
                    spans=spans,
                    source_row=row.number,
                    given_from=given_from,
                )
            )
            room = None if room is None else room - tokens.size
            capped = len(prompts) == wanted or (room is not None and room <= 0)
            if capped:
                break
        wanted = None if wanted is None else wanted - len(prompts)
        few = FEW if prompts else 2 * few
        complete = at_end and not capped
        yield Batch(
            prompts=prompts, next_row=next_row, complete=complete, dropped=dict(dropped), skipped=skipped
        )
        if complete:
            return


def _chunk(source: Iterator[Row], size: int, column: str) -> tuple[list[Row], bool]:
    """The next rows, `size` of them or such that hold `IDS`; and whether there are no more."""
    chunk: list[Row] = []
    ids = 0
    for row in source:
        chunk.append(row)
        value = row.value.get(column) if isinstance(row.value, Mapping) else None
        ids += len(value) if isinstance(value, list) else 0
        if len(chunk) == size or ids >= IDS:
            return chunk, False
    return chunk, True


_Made = tuple[Tokens, tuple[Span, ...], int | None]


def _make(rows: Sequence[Row], shape: Shape, template: Template, limits: Limits) -> list[_Made | Dropped]:
    """For each row its tokens, spans and where a given answer begins, or why it has none."""
    made: list[_Made | Dropped | None] = [None] * len(rows)
    talks: list[tuple[int, Talk, str]] = []
    for i, row in enumerate(rows):
        if row.broken is not None:
            made[i] = Dropped(Reason.BROKEN_JSON, row.broken)
            continue
        match parse(row.value, shape):
            case Dropped() as dropped:
                made[i] = dropped
            case Given() as given:
                made[i] = _given(given, limits)
            case Talk() as talk:
                text = _rendered(talk, template, limits)
                if isinstance(text, Dropped):
                    made[i] = text
                else:
                    talks.append((i, talk, text))
    for i, one in _encoded(talks, template):
        ids, spans = one
        tokens = np.array(ids, np.int32)
        made[i] = _refused(tokens, limits, answered=False) or (tokens, spans, None)
    return [one for one in made if one is not None]


def _encoded(
    talks: Sequence[tuple[int, Talk, str]], template: Template
) -> Iterator[tuple[int, tuple[list[int], tuple[Span, ...]]]]:
    """Ids and spans of each rendered talk, under its number, in any order."""
    longer = [one for one in talks if len(one[1].messages) > 1]
    single = [one for one in talks if len(one[1].messages) == 1]
    for (i, talk, text), ids in zip(single, template.encode([t for _, _, t in single]).ids, strict=True):
        spans = one_turn_spans(template, talk.messages[0], text, ids)
        if spans is None:
            longer.append((i, talk, text))
        else:
            yield i, (ids, spans)
    if longer:
        encoded = template.encode([text for _, _, text in longer], positions=True)
        for index, (i, talk, text) in enumerate(longer):
            ends = [
                None if end is None else tokens_before(template, encoded, index, text, end)
                for end in message_ends(template, talk.messages, text)
            ]
            ids = encoded.ids[index]
            yield i, (ids, prompt_spans(talk.messages, ends, len(ids)))


def _rendered(talk: Talk, template: Template, limits: Limits) -> str | Dropped:
    for message in talk.messages:
        if token := template.special_token_in(message["content"]):
            return Dropped(Reason.SPECIAL, f"{message['role']} turn: {token}")
    try:
        text = template.render(talk.messages)
        text.encode()
    except TemplateRefusedError as error:
        return Dropped(Reason.TEMPLATE, str(error)[:200])
    except UnicodeEncodeError:
        return Dropped(Reason.SURROGATE)
    if limits.max_input_tokens is not None:
        # Megabytes without a space take a tokenizer minutes and gigabytes; what cannot fit is not tried.
        least = len(text) // (SHRINKING * template.longest_token)
        if least > limits.max_input_tokens:
            return Dropped(Reason.TOO_LONG, f"over {least} tokens, at most {limits.max_input_tokens} fit")
    return text


def _given(given: Given, limits: Limits) -> _Made | Dropped:
    if given.ids.min() < 0 or given.ids.max() >= limits.vocab_size:
        return _outside(int(given.ids.min() if given.ids.min() < 0 else given.ids.max()), limits)
    tokens = as_tokens(given.ids)
    refused = _refused(tokens, limits, answered=True)
    if refused is not None:
        return refused
    if given.mask is None:
        return tokens, (Span(start=0, end=tokens.size, turn=0, kind=Kind.KEPT),), 0
    # Runs of equal mask values: one ends where the next begins.
    turns = [0, *(np.flatnonzero(np.diff(given.mask)) + 1).tolist(), tokens.size]
    spans = tuple(
        Span(start=start, end=end, turn=turn, kind=Kind.KEPT if given.mask[start] else Kind.UNKNOWN)
        for turn, (start, end) in enumerate(pairwise(turns))
    )
    return tokens, spans, int(given.mask.argmax())


def _refused(tokens: Tokens, limits: Limits, *, answered: bool) -> Dropped | None:
    if not tokens.size:
        return Dropped(Reason.NO_TOKENS)
    if int(tokens.max()) >= limits.vocab_size:
        return _outside(int(tokens.max()), limits)
    # A generated response has a token at least, and prompt + response must fit a capture request.
    most = None if limits.max_input_tokens is None else limits.max_input_tokens - (1 if answered else 2)
    if most is not None and tokens.size > most:
        return Dropped(Reason.TOO_LONG, f"{tokens.size} tokens, at most {most} fit")
    return None


def _outside(token: int, limits: Limits) -> Dropped:
    return Dropped(Reason.VOCABULARY, f"id {token}, the vocabulary has {limits.vocab_size}")
