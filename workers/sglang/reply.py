"""What `/generate` answered, read from its JSON: the edge where a server's words become ours.

Whether the reply is what was asked for is in `checks.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import FullError, UsageError
from storage.json_records import is_count, is_number
from storage.sample import SpoolRef, Timings
from storage.tokens import Tokens, as_tokens
from workers.sglang.outcomes import CallError

MALFORMED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    UsageError,
)
"""What reading a body raises that is not `/generate`'s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepliedStates:
    """Where a reply's states lie and what they are."""

    ref: SpoolRef
    hs_indices: tuple[int, ...]
    norm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """What a server says of the tokens it was sent."""

    tokens: Tokens
    """Ids, int32 [k]."""
    values: NDArray[np.float64]
    """Their natural log-probabilities, each given all before it, [k]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One call's answer, its hidden states left out."""

    rid: str
    """The request's id, as the server repeats it."""
    tokens: Tokens
    """Output ids, int32 [T], the stop token included."""
    text: str
    finish: str
    """`stop`, `length`, `abort`, or whatever else it says."""
    finish_message: str
    """Why it was aborted; else empty."""
    finish_status: int
    """HTTP status that goes with an abort; 0 when none is given."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    retractions: int
    weights: frozenset[str]
    """Versions of the weights that made it; empty when the server does not say."""
    timings: Timings
    states: RepliedStates | None
    logprobs: TokenLogprobs | None = None
    """Of the prompt's tokens that were asked for; None when none were."""


def read_reply(content: Any) -> Reply:
    """The reply in the decoded body.

    Raises `CallError` when it is not one, `FullError` when the server's spool had no room.
    """
    try:
        return _read(content)
    except MALFORMED as error:
        said = printable(f"the reply is not `/generate`'s: {error!r}"[:300])
        raise CallError(said, code="reply.garbage") from None


def _read(content: Any) -> Reply:
    meta = content["meta_info"]
    finish = meta["finish_reason"]
    return Reply(
        rid=printable(_text(meta["id"])),
        tokens=as_tokens(content["output_ids"]),
        text=printable(_text(content.get("text") or "")),
        finish=printable(_text(finish["type"])),
        finish_message=printable(_text(finish.get("message") or "")),
        finish_status=_count(finish.get("status_code") or 0),
        prompt_tokens=_count(meta["prompt_tokens"]),
        completion_tokens=_count(meta["completion_tokens"]),
        cached_tokens=_count(meta.get("cached_tokens") or 0),
        retractions=_count(meta.get("num_retractions") or 0),
        weights=_read_weights(meta),
        timings=Timings(
            e2e_s=_number(meta.get("e2e_latency") or 0.0),
            queue_s=_number(meta.get("queue_time") or 0.0),
            first_token_s=_number(meta.get("first_token_latency") or 0.0),
        ),
        states=_read_states(meta["eyas_states"]) if meta.get("eyas_states") else None,
        logprobs=_read_logprobs(meta["input_token_logprobs"]) if meta.get("input_token_logprobs") else None,
    )


def _read_weights(meta: Mapping[str, Any]) -> frozenset[str]:
    """A request during which they were replaced names each version, with the tokens made by it."""
    spans = [str(span["version"]) for span in meta.get("weight_versions") or ()]
    last = meta.get("weight_version")
    return frozenset(spans if last is None else [*spans, str(last)])


def _read_states(content: Mapping[str, Any]) -> RepliedStates:
    error = content.get("error")
    said = printable(_text(content.get("message", "")))[:300]
    if error == "spool.full":
        raise FullError(f"the server's spool is full: {said}", code="spool.full")
    if error:
        raise CallError(
            f"the server could not write the states: `{printable(_text(error))[:100]}` {said}",
            code="states.missing",
        )
    t, layers, hidden = (_count(size) for size in content["shape"])
    if 0 in (t, layers, hidden):
        raise ValueError(f"states of shape {(t, layers, hidden)}")
    return RepliedStates(
        ref=SpoolRef(
            node=printable(_text(content["node"])),
            name=printable(_text(content["name"])),
            shape=(t, layers, hidden),
            crc32=_count(content["crc32"], below=2**32),
        ),
        hs_indices=tuple(_count(i) for i in content["hs_indices"]),
        norm=printable(_text(content["norm"])),
    )


def _read_logprobs(entries: Sequence[Sequence[Any]]) -> TokenLogprobs:
    """From `[logprob, id, text]` a token; the first has none, since nothing is known before it."""
    said = entries[1:] if entries[0][0] is None else entries
    return TokenLogprobs(
        tokens=as_tokens([entry[1] for entry in said]),
        values=np.array([_number(entry[0]) for entry in said]),
    )


def _count(value: Any, *, below: int = 2**31) -> int:
    """A count as messages and the store hold it."""
    if not is_count(value) or not 0 <= value < below:
        raise ValueError(f"`{value!r}` is no count"[:100])
    return int(value)


def _number(value: Any) -> float:
    if not is_number(value):
        raise ValueError(f"`{value!r}` is no number"[:100])
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text expected, found {type(value).__name__}")
    return value


def printable(text: str) -> str:
    """Without the lone halves of a pair that JSON can say and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
