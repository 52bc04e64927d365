"""Reads a `/generate` body as SGLang 0.5 does: what is ignored, what is refused, and in which order.

Unknown keys at the top are ignored, unknown sampling keys refused. What the real server does and this
engine cannot is refused too, never silently left out.
"""

import json
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.files import NAME
from storage.json_records import parse_json
from workers.engine.order import Sampling
from workers.engine.refusal import by_contract, by_schema, by_value

_INTEGERS = (
    "max_new_tokens",
    "min_new_tokens",
    "top_k",
    "n",
    "stream_interval",
    "sampling_seed",
    "beam_width",
)
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_SWITCHES = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
SAMPLING_KEYS = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *(
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "n",
        "json_schema",
        "regex",
    ),
    *("ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    *(
        "no_stop_trim",
        "stream_interval",
        "logit_bias",
        "sampling_seed",
        "custom_params",
        "beam_width",
        "watermark",
    ),
    "choice",
)
_UNSUPPORTED: dict[str, object] = {
    "stop": None,
    "stop_regex": None,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "beam_width": None,
    "watermark": None,
    "choice": None,
}
"""Sampling keys the engine does not act on, with the value that asks for nothing."""


TOP_KEYS = {
    "rid": str,
    "text": str,
    "stream": bool,
    "return_hidden_states": bool,
    "return_logprob": bool,
    "logprob_start_len": int,
}
"""What the engine reads at the top of a body, beside ids and sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolWish:
    """Where a request wants its states: what the Eyas plugin reads from `custom_params.eyas`."""

    name: str
    """File name in the spool."""
    hs_indices: tuple[int, ...] | None
    """Hugging Face `hidden_states` indices; None for all the server announces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A `/generate` body that could be read."""

    rid: str
    tokens: NDArray[np.int64] | None
    """[T]; None when there is a text."""
    text: str | None
    sampling: Sampling
    states: bool
    """`return_hidden_states`."""
    logprobs_from: int | None
    """Place in the ids from which log-probabilities are wanted, -1 for those of the output alone; None for
    none at all."""
    spool: SpoolWish | None
    stream: bool


def read_request(raw: bytes) -> Request:
    """The request in a body.

    Raises `Refusal`.
    """
    body = _object(raw)
    for key, kinds in TOP_KEYS.items():
        value = body.get(key)
        if value is not None and not isinstance(value, kinds):
            raise by_schema(
                f"1 validation error:\n  ('body', '{key}'): must be {kinds.__name__}; got {_kind(value)}"
            )
    tokens = _tokens(body.get("input_ids"))
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise by_schema(
            "1 validation error:\n  ('body', 'sampling_params'): Input should be a valid dictionary"
        )
    _check_contract(params)
    if tokens is None and body.get("text") is None:
        raise by_value("Either text, input_ids or input_embeds should be provided.")
    if tokens is not None and not len(tokens):
        raise by_value("input_ids cannot be empty.")
    return Request(
        rid=body.get("rid") or uuid.uuid4().hex,
        tokens=tokens,
        text=body.get("text") if tokens is None else None,
        sampling=_sampling(params),
        states=bool(body.get("return_hidden_states")),
        logprobs_from=_logprobs_from(body),
        spool=_spool_wish(params.get("custom_params")),
        stream=bool(body.get("stream")),
    )


def _object(raw: bytes) -> dict[str, Any]:
    if not raw:
        raise by_schema("1 validation error:\n  ('body',): Field required")
    try:
        body = parse_json(raw)
    except ValueError as error:
        raise by_schema(f"1 validation error:\n  ('body',): JSON decode error, {error}") from None
    if not isinstance(body, dict):
        raise by_schema("1 validation error:\n  ('body',): Input should be a dictionary")
    return body


def _tokens(ids: Any) -> NDArray[np.int64] | None:
    if ids is None:
        return None
    if not isinstance(ids, list):
        raise by_schema(
            f"1 validation error:\n  ('body', 'input_ids'): must be list or null; got {_kind(ids)}"
        )
    if ids and all(isinstance(item, list) for item in ids):
        raise by_value("the embedded engine takes one sequence a request: `input_ids` is a list of lists")
    for item in ids:
        if type(item) is not int:
            rule = f"elements must be int or list; got {_kind(item)}"
            raise by_schema(f"1 validation error:\n  ('body', 'input_ids'): {rule}")
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        raise by_value("input_ids holds a number that is not a token id") from None


def _check_contract(params: dict[str, Any]) -> None:
    for key, value in params.items():
        if key not in SAMPLING_KEYS:
            expected = ", ".join(f"`{known}`" for known in SAMPLING_KEYS)
            raise by_contract(f"unknown field `{key}`, expected one of {expected}")
        if value is None:
            continue
        if key in _INTEGERS and type(value) is not int:
            raise by_contract(f"invalid type: {_described(value)}, expected i64")
        if key in _NUMBERS and type(value) not in (int, float):
            raise by_contract(f"invalid type: {_described(value)}, expected f64")
        if key in _SWITCHES and type(value) is not bool:
            raise by_contract(f"invalid type: {_described(value)}, expected a boolean")
        if key == "stop_token_ids" and not (isinstance(value, list) and all(type(i) is int for i in value)):
            raise by_contract(f"invalid type: {_described(value)}, expected a sequence of i64")
        if key == "custom_params" and not isinstance(value, dict):
            raise by_contract(f"invalid type: {_described(value)}, expected a map")


def _sampling(params: dict[str, Any]) -> Sampling:
    def value(key: str, default: Any, good: Callable[[Any], bool], rule: str) -> Any:
        found = default if params.get(key) is None else params[key]
        if not good(found):
            raise by_value(f"{key} must be {rule}, got {found}.")
        return found

    for key, nothing in _UNSUPPORTED.items():
        if params.get(key) not in (None, nothing, [], "", {}):
            raise by_value(f"the embedded engine does not support the sampling parameter `{key}`")
    limit = params.get("max_new_tokens", 128)
    if limit is not None and limit < 0:
        raise by_value(f"max_new_tokens must be at least 0, got {limit}.")
    top = math.inf if limit is None else limit
    greedy = params.get("temperature") is not None and 0 <= params["temperature"] < 1e-6
    return Sampling(
        max_new_tokens=limit,
        temperature=value(
            "temperature", 1.0, lambda t: t >= 0 and math.isfinite(t), "a non-negative finite number"
        ),
        top_p=value("top_p", 1.0, lambda p: 0 < p <= 1, "in (0, 1]"),
        top_k=value("top_k", -1, lambda k: greedy or k == -1 or k >= 1, "-1 (disable) or at least 1"),
        min_new_tokens=value(
            "min_new_tokens", 0, lambda n: 0 <= n <= top, f"in [0, max_new_tokens({limit})]"
        ),
        stop_token_ids=frozenset(params.get("stop_token_ids") or ()),
        ignore_eos=bool(params.get("ignore_eos")),
        skip_special_tokens=params.get("skip_special_tokens") is not False,
        no_stop_trim=bool(params.get("no_stop_trim")),
        seed=value("sampling_seed", None, _is_seed, "in [-2**63, 2**63 - 1]"),
    )


def _logprobs_from(body: dict[str, Any]) -> int | None:
    if not body.get("return_logprob"):
        return None
    for key in ("top_logprobs_num", "token_ids_logprob"):
        if body.get(key):
            raise by_value(f"the embedded engine does not support `{key}`")
    start = body.get("logprob_start_len")
    return -1 if start is None else int(start)


def _is_seed(seed: int | None) -> bool:
    return seed is None or -(2**63) <= seed < 2**63


def _spool_wish(custom: dict[str, Any] | None) -> SpoolWish | None:
    wish = (custom or {}).get("eyas")
    if not isinstance(wish, dict) or wish.get("states") != "spool":
        return None
    name, indices = wish.get("name"), wish.get("hs_indices")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise by_value("custom_params.eyas.name is not a spool file's name")
    if indices is not None and not (
        isinstance(indices, list) and indices and all(type(i) is int for i in indices)
    ):
        raise by_value("custom_params.eyas.hs_indices must be a list of integers")
    return SpoolWish(name=name, hs_indices=None if indices is None else tuple(indices))


def _kind(value: Any) -> str:
    return type(value).__name__


def _described(value: Any) -> str:
    match value:
        case str():
            return f"string {json.dumps(value)}"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{value}`"
        case list():
            return "sequence"
        case _:
            return "map"
