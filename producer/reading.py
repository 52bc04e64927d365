"""Prompts into the store, segment by segment, so that a kill loses at most the last one.

A segment's commit carries the row to go on from. Rows already tokenized become responses with
finish `given`: prompts first, then responses, and what a kill left between the two is found again
by comparing both. What a row becomes is in `prompts.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from producer.forms import Form
from producer.occurrences import Occurrences
from producer.preparing import Prepared
from producer.prompts import Batch, Limits, Skipped, make_prompts
from producer.sources import read_rows
from producer.template import Template
from storage.index import Index, Outcome
from storage.sample import Finish, Prompt, Response
from storage.store import Store
from storage.tokens import response_digest

GIVEN_AT_ONCE = 512
"""Responses of one commit; a tokenized row may be long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What the store holds of a dataset."""

    prompts: int
    tokens: int
    """Of the prompts."""
    dropped: dict[str, int]
    """Reason → rows."""
    new: int
    """Prompts that were stored just now."""
    complete: bool
    """Whether the source was read to its end."""


def enough(store: Store, prepared: Prepared, limits: Limits) -> bool:
    """Whether the store already holds all prompts that these limits ask of the dataset.

    False for one that is not in the store yet.
    """
    name = prepared.dataset.name
    if store.dataset_spec(name) is None:
        return False
    state = store.reading_state(name)
    if state.complete or (limits.max_prompts is not None and state.count >= limits.max_prompts):
        return True
    return limits.max_tokens is not None and _tokens(store, name) >= limits.max_tokens


def read_into(
    store: Store,
    prepared: Prepared,
    template: Template,
    limits: Limits,
    *,
    progress: Callable[[Batch], None],
) -> Stored:
    """Read on where the store ends, until its limits or the end of the source.

    `progress` is told of each batch once it is committed.
    """
    name = prepared.dataset.name
    store.begin_dataset(prepared.spec)
    state = store.reading_state(name)
    ids: list[bytes] = []
    tokens = 0
    for prompt in store.prompts(name):
        ids.append(prompt.id)
        tokens += prompt.tokens.size
    left = Limits(
        vocab_size=limits.vocab_size,
        max_input_tokens=limits.max_input_tokens,
        max_prompts=None if limits.max_prompts is None else limits.max_prompts - state.count,
        max_tokens=None if limits.max_tokens is None else limits.max_tokens - tokens,
    )
    dropped = Counter(state.dropped)
    new = 0
    complete = state.complete
    for batch in make_prompts(
        read_rows(prepared.files, state.next_row, prepared.shape.columns),
        dataset=name,
        shape=prepared.shape,
        template=template,
        limits=left,
        seen=Occurrences(name, ids),
        start=state.next_row,
    ):
        store.add_prompts(
            name, batch.prompts, next_row=batch.next_row, complete=batch.complete, dropped=batch.dropped
        )
        new += len(batch.prompts)
        tokens += sum(prompt.tokens.size for prompt in batch.prompts)
        dropped.update(batch.dropped)
        complete = batch.complete
        progress(batch)
    return Stored(
        prompts=state.count + new, tokens=tokens, dropped=dict(dropped), new=new, complete=complete
    )


def commit_given(store: Store, prepared: Prepared, template: Template) -> int:
    """Commit the answers that came with the rows of a tokenized dataset, where they are missing.

    How many were.
    """
    if prepared.shape.form is not Form.INPUT_IDS:
        return 0
    name = prepared.dataset.name
    index = Index(store, None)
    index.refresh()
    missing = (index.dataset(name).outcome == Outcome.NONE).nonzero()[0].tolist()
    committed = 0
    for first in range(0, len(missing), GIVEN_AT_ONCE):
        some = missing[first : first + GIVEN_AT_ONCE]
        wanted = set(some)
        stored = enumerate(store.prompts(name, some[0], some[-1] + 1), start=some[0])
        prompts = [prompt for position, prompt in stored if position in wanted]
        committed += store.commit_responses(_responses(prompts, template))
    return committed


def _responses(prompts: Iterable[Prompt], template: Template) -> list[Response]:
    return [
        Response(
            id=prompt.id,
            digest=response_digest(prompt.tokens),
            dataset=prompt.dataset,
            tokens=prompt.tokens,
            prompt_length=prompt.given_from or 0,
            spans=prompt.spans,
            text=template.decode(prompt.tokens[prompt.given_from or 0 :].tolist()),
            finish=Finish.GIVEN,
        )
        for prompt in prompts
    ]


def _tokens(store: Store, name: str) -> int:
    return sum(prompt.tokens.size for prompt in store.prompts(name))


def skipped_lines(skipped: Sequence[Skipped], most: int) -> list[str]:
    """The first skipped rows, a line each."""
    return [f"{one.where}: {one.reason.value}" + (f" ({one.detail})" if one.detail else "") for one in skipped[:most]]
