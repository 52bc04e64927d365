"""The nouns that the store keeps: prompt, span, response, states and their check, failure.

Frozen value objects only; how they lie on disk is in `prompts.py`, `responses.py`, `states.py`
and `failures.py`.
"""

from dataclasses import dataclass
from enum import StrEnum

from storage.tokens import Tokens


class Kind(StrEnum):
    """What a span of tokens is, for loss masks made at export."""

    SYSTEM = "system"
    USER = "user"
    TOOL = "tool"
    KEPT = "kept"
    """Assistant tokens that were given, not generated."""
    GENERATED = "generated"
    UNKNOWN = "unknown"


class Finish(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    GIVEN = "given"
    """The row came with its tokens; nothing was generated."""


class Stage(StrEnum):
    """The step at which a sample became a dead letter."""

    GENERATE = "generate"
    CAPTURE = "capture"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What the tokens `[start, end)` are."""

    start: int
    """First token."""
    end: int
    """One past the last token."""
    turn: int
    """Index of the message they belong to, from 0."""
    kind: Kind
    reasoning: bool = False
    """Whether they are a model's reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A dataset's row as token ids."""

    id: bytes
    """`tokens.prompt_id`, 16 bytes."""
    dataset: str
    tokens: Tokens
    """int32 [T]; for a row already tokenized, all of it, its answer included."""
    spans: tuple[Span, ...]
    source_row: int
    """Row of the source it came from, from 0 over all files of the source."""
    given_from: int | None = None
    """For a row already tokenized, where its given answer begins (0 without a mask); else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What the server said of one call; 0.0 where it said nothing."""

    e2e_s: float = 0.0
    """Whole call, seconds."""
    queue_s: float = 0.0
    """Waiting in the server, seconds."""
    first_token_s: float = 0.0
    """Until the first token, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Prompt and response as the target model produced them."""

    id: bytes
    digest: bytes
    """`tokens.response_digest` of `tokens`, 16 bytes."""
    dataset: str
    tokens: Tokens
    """Prompt and response, int32 [T]."""
    prompt_length: int
    """Tokens of the prompt: the response is `tokens[prompt_length:]`."""
    spans: tuple[Span, ...]
    text: str
    """A view of the response for people; training never reads it."""
    finish: Finish
    cached_tokens: int = 0
    """Prompt tokens the server took from its prefix cache."""
    retractions: int = 0
    """How often the server took the request back."""
    attempt: int = 1
    """Which attempt succeeded, from 1."""
    timings: Timings = Timings()
    facts_id: str = ""
    """Which `facts/<facts_id>.json` describes the server; empty when nothing was generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolRef:
    """Where states wait for the sink of their node: metadata only, never a tensor."""

    node: str
    """`EYAS_NODE` of the machine whose spool holds the file."""
    name: str
    """File name inside that spool; one attempt, one name."""
    shape: tuple[int, int, int]
    """[T, L, H]."""
    crc32: int
    """zlib's CRC-32 over the raw bf16 bytes."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor, 2 an element."""
        t, layers, hidden = self.shape
        return t * layers * hidden * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A figure of a check that no sound capture gives."""

    code: str
    """Stable and short: `states.differ`, `head.differs`, …"""
    value: float
    """The figure."""
    limit: float
    """What it may be at most, or at least."""
    message: str
    """Where it was found and what to do, one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What came of capturing a sample a second time and computing on its states; None: not known."""

    server: str
    """Address that gave both captures."""
    rows: int = 0
    """Rows compared with a second capture; 0 when there was none to compare."""
    worst_error: float | None = None
    """‖a − b‖ ÷ ‖a‖ of the row that differs most, of any layer."""
    typical_error: float | None = None
    """The median of that over a layer's rows, of the layer that differs most."""
    worst_cosine: float | None = None
    """Least cosine of a row and its second capture."""
    rms: float | None = None
    """Of final state ÷ norm weight, of the row where it is farthest from 1."""
    positions: int = 0
    """Last tokens of the sample whose log-probability the server said."""
    mean_logprob: float | None = None
    """Of those of these tokens that are the response's, nats, as the server says it."""
    head_error: float | None = None
    """Mean of |log-probability from the stored final state − the server's|, nats."""
    skipped: tuple[str, ...] = ()
    """What was not checked, and why."""
    alarms: tuple[Alarm, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Hidden states of one response, still in the spool."""

    id: bytes
    digest: bytes
    dataset: str
    capture: str
    """The capture's name, `eagle3` or such: the folder under `states/`."""
    spool: SpoolRef
    facts_id: str
    hs_indices: tuple[int, ...]
    """Hugging Face `hidden_states` indices of the L layers, in order; `n` is the final state."""
    norm: str
    """`post` when the final state has passed the final norm, `pre` before, `none` without one."""
    check: Check | None = None
    """For the few samples that are checked: what came of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A dead letter: why a prompt has no response, or a response no states."""

    id: bytes
    digest: bytes | None
    """The response whose states failed; None when generating failed."""
    capture: str | None
    dataset: str
    stage: Stage
    attempts: int
    code: str
    """Stable and short: `server.refused`, `states.short`, …"""
    message: str
    retry: int = 0
    """The last request to try dead letters again when this was tried, see `retries.py`; 0 before any."""
