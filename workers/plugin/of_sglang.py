"""What the plugin reads of SGLang's objects, as types: when a release moves one, it is looked for here.

Only what is used, under SGLang's own names. Nothing is done here.
"""

from collections.abc import Sequence
from typing import Any, Protocol

KEY = "eyas_states"
"""Under which `meta_info` says where a request's states are."""
ATTRIBUTE = "eyas"
"""Under which the plugin keeps its own on SGLang's requests and batch results."""


class Finished(Protocol):
    """Why a request ended."""

    def to_json(self) -> dict[str, Any]:
        """As `finish_reason` in the reply; `type` is `stop`, `length` or `abort`."""


class SamplingParams(Protocol):
    """How a request is sampled."""

    n: int
    custom_params: Any


class Request(Protocol):
    """`sglang.srt.managers.schedule_batch.Req`, which lives until its reply is sent."""

    rid: str
    stream: bool
    return_hidden_states: Any
    """True, False or `last`."""
    return_logprob: bool
    sampling_params: SamplingParams
    origin_input_ids: Sequence[int]
    output_ids_through_stop: Sequence[int]
    finished_reason: Finished | None
    is_retracted: bool
    inflight_middle_chunks: int
    """Chunks of its prefill that are launched and are not its last."""
    cached_tokens: int
    retraction_count: int
    customized_info: dict[str, Any] | None

    def finished(self) -> bool:
        """Whether it has its last token."""


class ForwardMode(Protocol):
    """What a batch does."""

    def is_extend(self) -> bool:
        """Several tokens of a request, a chunk of its prefill; single ones may be mixed in."""

    def is_decode(self) -> bool:
        """One token of each request."""


class Batch(Protocol):
    """`sglang.srt.managers.schedule_batch.ScheduleBatch` at the moment it is launched."""

    reqs: Sequence[Request]
    forward_mode: ForwardMode
    return_hidden_states: bool
    """Whether any of its requests asks for them."""
    prefix_lens: Sequence[int]
    """Extend only: tokens of each request that came before this batch."""
    extend_lens: Sequence[int]
    """Extend only: tokens of each request in this batch."""
    seq_lens_cpu: Any
    """Tokens of each request, this batch's included; a tensor on the host."""


class LogitsOutput(Protocol):
    """`sglang.srt.layers.logits_processor.LogitsProcessorOutput`."""

    hidden_states: Any
    """[rows, K · H] of the auxiliary layers side by side, or [rows, H] of the final state."""
    last_hidden_states: Any
    """[rows, H]: the final state, what `lm_head` is applied to."""
    hidden_states_token_indices: Any
    """Not None when only some rows are there."""
