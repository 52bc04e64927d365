"""Builds what `/generate` answers: text, ids and `meta_info`, with states as JSON like a stock server's.

Rows of states are one entry an output token: the prompt's block, then one row for each token that ran.
"""

import functools
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.engine.bf16 import Bits, from_bits
from workers.engine.order import Completion, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When a request came and began, monotonic seconds."""

    received: float
    started: float
    first_token: float


def finish_reason(completion: Completion) -> dict[str, Any]:
    """Why it ended, as SGLang says it."""
    if completion.aborted:
        return {
            "type": "abort",
            "message": "Abort in waiting or running queue",
            "status_code": None,
            "err_type": None,
        }
    if completion.matched is not None:
        return {"type": "stop", "matched": completion.matched}
    return {"type": "length", "length": len(completion.output_ids)}


def meta_info(
    rid: str, prompt_tokens: int, completion: Completion, clock: Clock, weights: str
) -> dict[str, Any]:
    """Everything said about a request but its states."""
    count = len(completion.output_ids)
    finished = time.monotonic()
    wall = time.time() - finished
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": finish_reason(completion),
        "prompt_tokens": prompt_tokens,
        "weight_version": weights,
        "num_retractions": 0,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": wall + clock.started,
        "prefill_finished_time": wall + clock.first_token,
        "queue_time": max(0.0, clock.started - clock.received),
        "reasoning_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_versions": [{"version": weights, "start": 0, "end": count}],
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": finished - clock.received,
        "request_received_ts": wall + clock.received,
        "first_token_latency": clock.first_token - clock.received,
        "api_server_dispatch_finish_ts": wall + clock.received,
        "request_finished_ts": wall + finished,
    }
    if count > 1 and finished > clock.first_token:
        meta["decode_throughput"] = (count - 1) / (finished - clock.first_token)
    meta["response_sent_to_client_ts"] = time.time()
    return meta


def logprobs_json(order: Order, completion: Completion) -> dict[str, Any]:
    """Log-probabilities as SGLang says them: `[value, id, text]` a token; the first has no value.

    Of an aborted request there are fewer of either kind than tokens.
    """
    start = order.logprobs_from
    assert start is not None
    read: list[float | None] = [None, *completion.prompt_logprobs] if start < len(order.tokens) else []
    return {
        "input_token_logprobs": [
            [value, int(token), None] for value, token in zip(read, order.tokens[start:], strict=False)
        ],
        "output_token_logprobs": [
            [value, token, None]
            for value, token in zip(completion.output_logprobs, completion.output_ids, strict=False)
        ],
        "output_token_logprobs_length": len(completion.output_ids),
    }


def encode(reply: dict[str, Any], states: str | None = None) -> bytes:
    """The reply as JSON, with `states` (JSON already) as `meta_info.hidden_states`."""
    if states is not None:
        reply["meta_info"]["hidden_states"] = None
    text = json.dumps(reply, separators=(",", ":"), ensure_ascii=False)
    if states is not None:
        before, after = text.rsplit('"hidden_states":null', 1)
        text = f'{before}"hidden_states":{states}{after}'
    return text.encode()


def states_json(states: Bits, prompt_tokens: int) -> str:
    """States [T, L, H] as rows of L · H numbers, the prompt's in a block of their own."""
    rows = [_row(row) for row in states.reshape(len(states), -1)]
    block = f"[{','.join(rows[:prompt_tokens])}]"
    return f"[{','.join([block, *rows[prompt_tokens:]])}]"


def _row(row: Bits) -> str:
    return "[" + ",".join(map(_numbers().__getitem__, row.tolist())) + "]"


@functools.cache
def _numbers() -> list[str]:
    """How JSON writes each of the 65 536 bfloat16 values: looking up is twenty times faster than writing."""
    return [repr(value) for value in from_bits(np.arange(65536).astype(np.uint16)).tolist()]
