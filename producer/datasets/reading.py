"""Prompts into the store, segment by segment, so that a kill loses at most the last one.

A segment's commit carries the row to go on from. Rows already tokenized become responses with
finish `given`: prompts first, then responses, and what a kill leaves between the two the feeder
makes up for, as it finds a prompt without a response. What a row becomes is in `prompts.py`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from producer.datasets.occurrences import Occurrences
from producer.datasets.preparing import Prepared
from producer.datasets.prompts import Batch, Limits, make_prompts
from producer.datasets.sources import read_rows
from producer.datasets.template import Template
from storage.sample import Prompt
from storage.store import Store
from workers.feeder.orders import given_response

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


def enough(store: Store | None, prepared: Prepared, limits: Limits) -> bool:
    """Whether the store already holds all prompts that these limits ask of the dataset.

    False for one that is not in the store yet, and where there is no store.
    """
    name = prepared.dataset.name
    if store is None or store.dataset_spec(name) is None:
        return False
    state = store.reading_state(name)
    if state.complete or (limits.max_prompts is not None and state.count >= limits.max_prompts):
        return True
    return limits.max_tokens is not None and store.prompt_tokens(name) >= limits.max_tokens


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
    tokens = store.prompt_tokens(name)
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
        seen=Occurrences(name, store.prompt_ids(name)),
        start=state.next_row,
    ):
        store.add_prompts(
            name, batch.prompts, next_row=batch.next_row, complete=batch.complete, dropped=batch.dropped
        )
        _commit_given(store, batch.prompts)
        new += len(batch.prompts)
        tokens += sum(prompt.tokens.size for prompt in batch.prompts)
        dropped.update(batch.dropped)
        complete = batch.complete
        progress(batch)
    return Stored(prompts=state.count + new, tokens=tokens, dropped=dict(dropped), new=new, complete=complete)


def _commit_given(store: Store, prompts: Sequence[Prompt]) -> None:
    given = [prompt for prompt in prompts if prompt.given_from is not None]
    for first in range(0, len(given), GIVEN_AT_ONCE):
        store.commit_responses([given_response(prompt) for prompt in given[first : first + GIVEN_AT_ONCE]])
