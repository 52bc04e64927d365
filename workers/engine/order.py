"""What the engine is asked to compute and what comes of it, free of HTTP."""

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workers.engine.bf16 import Bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request picks its tokens; SGLang's names and defaults."""

    max_new_tokens: int | None = 128
    """None leaves it to the context."""
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 considers every token."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    """Goes on past every kind of stop token."""
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    """Keeps the stop token in the text; it always stays in the ids."""
    seed: int | None = None
    """The same seed and prompt give the same tokens; None draws one."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < 1e-6 or self.top_k == 1


@dataclass(slots=True, kw_only=True, eq=False)
class Order:
    """One sequence to compute."""

    tokens: NDArray[np.int64]
    """The prompt [T]."""
    sampling: Sampling
    max_new_tokens: int
    """What is left of the request's after the context's limit."""
    layers: tuple[int, ...] = ()
    """Hugging Face `hidden_states` indices whose states are wanted; none by default."""
    logprobs_from: int | None = None
    """First token of the prompt whose log-probability is wanted; `T` for those of the output alone, None for
    none at all."""
    stop_at: int | None = None
    """How many output tokens until end-of-sequence is forced; None leaves it to the model."""
    aborted: bool = False
    """Set from another thread: whatever there is comes back at once."""


@dataclass(slots=True, kw_only=True)
class Completion:
    """What became of an order."""

    output_ids: list[int] = field(default_factory=list)
    matched: int | None = None
    """The stop token that ended it, also the last of `output_ids`; None when the length did."""
    aborted: bool = False
    states: Bits | None = None
    """[prompt + output - 1, layers, H], or None when none were asked for: the last token never ran."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Of the prompt's tokens behind `logprobs_from`, natural, each given all before it."""
    output_logprobs: list[float] = field(default_factory=list)
    """Of the output's, at its temperature."""
    started: float = field(default_factory=time.monotonic)
    """When its prefill began, monotonic seconds."""
    first_token: float = field(default_factory=time.monotonic)
    finished: float = field(default_factory=time.monotonic)
