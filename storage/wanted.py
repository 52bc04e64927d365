"""What is wanted of a dataset and what of it is there: the one definition of "finished" and of
"read far enough".

The feeder, `status` and `verify` all count with this. Nothing here reads files.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.dataset_index import DatasetIndex, Outcome
from storage.run import StatesMode
from storage.settings import DatasetSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A dataset's counts. `total` is `done` + `failed` + the missing."""

    total: int
    """Prompts that are wanted, of those stored so far."""
    done: int
    """Have all that the states mode asks for."""
    failed: int
    """Dead letters."""
    missing: NDArray[np.int64]
    """Positions of the prompts that still need a response or, when they have one, states."""
    tokens: int
    """Prompt and response tokens of the wanted prompts that have a response and are not dead."""
    closed: bool
    """No more responses are wanted, because a cap is reached: a `Generate` of this dataset need
    not run. A `Capture` still must: responses may be waiting for their states."""

    @property
    def finished(self) -> bool:
        """Whether every wanted prompt has its outcome."""
        return not len(self.missing)


def wanted(dataset: DatasetIndex, settings: DatasetSettings, states: StatesMode) -> Wanted:
    """Count the first `max_samples` prompts, as far as `max_tokens` lets them.

    Tokens count from the response on, not from the states: generating stops at the cap even when
    capturing has not begun. Responses past the cap, in the prompts' order, are not captured;
    what is stored already counts all the same.
    """
    count = len(dataset) if settings.max_samples is None else min(len(dataset), settings.max_samples)
    outcome = dataset.outcome[:count]
    stored, dead = outcome == Outcome.STORED, outcome == Outcome.DEAD
    responded = stored | (outcome == Outcome.RESPONDED)
    done = responded if states is StatesMode.OFF else stored
    tokens = np.where(responded, dataset.sample_tokens[:count], 0).astype(np.int64)
    full = settings.max_tokens is not None and int(tokens.sum()) >= settings.max_tokens
    missing = ~done & ~dead
    if full and settings.max_tokens is not None:
        before = np.cumsum(tokens) - tokens
        missing &= responded & (before < settings.max_tokens)
    kept = done | dead | missing
    reached = settings.max_samples is not None and len(dataset) >= settings.max_samples
    return Wanted(
        total=int(np.count_nonzero(kept)),
        done=int(np.count_nonzero(done)),
        failed=int(np.count_nonzero(dead)),
        missing=np.flatnonzero(missing),
        tokens=int(tokens[kept].sum()),
        closed=full or (reached and not np.any(outcome == Outcome.NONE)),
    )


def read_enough(dataset: DatasetIndex, settings: DatasetSettings, counts: Wanted, *, complete: bool) -> bool:
    """Whether no more prompts of the source are wanted; `complete` says that it has no more rows.

    Reading also ends where the prompts alone reach `max_tokens`, dead letters among them or not:
    a dead letter then leaves the cap unreached, and still there is nothing to wait for.
    """
    if complete or counts.closed:
        return True
    if settings.max_samples is not None and len(dataset) >= settings.max_samples:
        return True
    prompt_tokens = int(dataset.prompt_tokens.sum(dtype=np.int64))
    return settings.max_tokens is not None and prompt_tokens >= settings.max_tokens
