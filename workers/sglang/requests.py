"""What is asked of `/generate`: the bodies of requests. Nothing is sent here.

Every attempt has its own `rid`, random and of fixed length: a server refuses one that is still in
flight, and aborts by prefix. Every attempt that wants states has its own `extra_key`, the name of
a prefix cache: tokens found in a cache have no hidden states.
"""

import hashlib
import secrets
from typing import Any

from storage.run import CaptureSpec, Sampling
from storage.tokens import Tokens, as_tokens


def sampling_seed(prompt_id: bytes, seed: int) -> int:
    """31 bits from the prompt's id and the run's seed: a call made twice tends to say the same.

    The first four bytes of BLAKE2b over the id and the seed as u32 little-endian.
    """
    mixed = hashlib.blake2b(prompt_id + (seed & 0xFFFFFFFF).to_bytes(4, "little")).digest()
    return int.from_bytes(mixed[:4], "little") & 0x7FFFFFFF


def generate_body(
    prompt: Tokens,
    *,
    sampling: Sampling,
    seed: int,
    max_new_tokens: int,
    fresh_cache: bool,
) -> dict[str, Any]:
    """A request for a response. `fresh_cache` gives up the prefixes that prompts share."""
    body = _body(prompt)
    body["sampling_params"] = _sampling_params(sampling, seed, max_new_tokens)
    if fresh_cache:
        body["extra_key"] = secrets.token_hex(8)
    return body


def capture_body(tokens: Tokens, *, logprobs: int = 0) -> dict[str, Any]:
    """A request that only prefills: one new token is the fewest that returns states.

    `logprobs` asks for the log-probabilities of so many of the last tokens, fewer than there are.
    """
    body = _body(tokens)
    if logprobs:
        # Of the first token that is named a server says nothing: it begins one before.
        body |= {"return_logprob": True, "logprob_start_len": len(tokens) - 1 - logprobs}
    body["sampling_params"] = {"max_new_tokens": 1, "temperature": 0.0}
    body["extra_key"] = secrets.token_hex(8)
    return body


def asking_states(body: dict[str, Any], *, capture: CaptureSpec, spool_name: str | None) -> dict[str, Any]:
    """The body with hidden states asked for: in the spool under this name, or in the reply.

    A stock server accepts `custom_params` and ignores them; the plugin reads `eyas`.
    """
    asked = {**body, "return_hidden_states": True}
    if spool_name is not None:
        eyas = {
            "states": "spool",
            "name": spool_name,
            "capture": capture.name,
            "hs_indices": list(capture.hs_indices),
        }
        asked["sampling_params"] = {**body["sampling_params"], "custom_params": {"eyas": eyas}}
    return asked


def probe_body(sampling: Sampling, *, states: bool) -> dict[str, Any]:
    """A request for one token after two that every vocabulary has, in the way the run asks for many."""
    body = _body(as_tokens([1, 2]))
    body["sampling_params"] = _sampling_params(sampling, 0, 1)
    body["extra_key"] = secrets.token_hex(8)
    body["return_hidden_states"] = states
    return body


def _sampling_params(sampling: Sampling, seed: int, max_new_tokens: int) -> dict[str, Any]:
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "sampling_seed": seed,
        # The text is a view for people, who want to see where the reasoning ends.
        "skip_special_tokens": False,
    }


def _body(tokens: Tokens) -> dict[str, Any]:
    return {
        "input_ids": tokens.tolist(),
        "rid": secrets.token_hex(16),
        "return_hidden_states": False,
        "stream": False,
    }
