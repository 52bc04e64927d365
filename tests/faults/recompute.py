"""What the engine's model computes for a stored sample, in this process: one prefill, no server, no queue.

The states are the prefill's own. The final state of each row gives the logits for the next token, so
the same prefill says which token the engine picks there.
"""

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np

from workers.engine import tiny_model_dir
from workers.engine.bf16 import from_bits
from workers.engine.detokenize import Detokenizer
from workers.engine.llama import Llama
from workers.engine.order import Sampling
from workers.engine.sampler import pick
from workers.engine.stopping import stop_at

MEAN_TOKENS = 64
"""The engine's default."""


@cache
def _model() -> tuple[Llama, np.ndarray]:
    folder = tiny_model_dir()
    model = Llama(folder)
    masked = Detokenizer(folder).special_ids | frozenset(model.config.eos_ids)
    return model, np.array(sorted(masked))


def is_right(
    tokens: np.ndarray, prompt_length: int, prompt_id: bytes, stored: Sequence[bytes], seed: int
) -> bool:
    """Whether a response and its states, each stored copy by its digest, are the engine's bit for bit."""
    states, picked = states_and_tokens(tokens, prompt_length, prompt_id, seed=seed)
    return picked == tokens[prompt_length:].tolist() and set(stored) == {tensor_digest(states)}


def tensor_digest(states: np.ndarray) -> bytes:
    """BLAKE2b over a tensor's shape and bytes."""
    return hashlib.blake2b(f"{states.shape}".encode() + states.tobytes()).digest()


def states_and_tokens(
    tokens: np.ndarray, prompt_length: int, prompt_id: bytes, *, seed: int, temperature: float = 1.0
) -> tuple[np.ndarray, list[int]]:
    """States of every row, uint16 [T, 4, H], and the response as picked, one token a stored one.

    A pick depends on the tokens before it, so a stored response is the engine's exactly when every
    pick is the stored token.
    """
    model, masked = _model()
    config = model.config
    layers = (*config.aux_layers, config.num_layers)
    *_, states = model.prefill(tokens.astype(np.int64), layers)
    assert states is not None
    produced = len(tokens) - prompt_length
    final = from_bits(states[prompt_length - 1 : -1, -1]).astype(np.float64)
    logits = model.logits(final)
    logits[:, masked] = -np.inf
    sampling = Sampling(temperature=temperature)
    mixed = hashlib.blake2b(prompt_id + (seed & 0xFFFFFFFF).to_bytes(4, "little")).digest()
    seeds = [int.from_bytes(mixed[:4], "little") & 0x7FFFFFFF] * produced
    picked = pick(logits, [sampling] * produced, seeds, range(produced)).tolist()
    end = stop_at(tokens[:prompt_length].astype(np.int64), MEAN_TOKENS)
    if produced >= end:
        picked[end - 1] = config.eos_ids[0]
        del picked[end:]
    return states, picked
