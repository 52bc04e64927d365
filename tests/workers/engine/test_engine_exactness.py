"""A sequence's bits do not depend on its batch, on chunks, or on whether a token was read or generated."""

import numpy as np
import pytest

from workers.engine import tiny_model_dir
from workers.engine.bf16 import rounded, to_bits
from workers.engine.kvcache import CAPACITIES, Pools
from workers.engine.llama import Llama

LAYERS = (2, 4, 5, 8)


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(tiny_model_dir())


def prompts(seed: int, count: int, longest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2000, size=length) for length in rng.integers(1, longest, size=count)]


def decode_together(model: Llama, starts: list[np.ndarray], steps: int) -> list[np.ndarray]:
    """Rows [steps, L, H] of each sequence's generated tokens, and the tokens, all decoded in one batch."""
    pools: Pools[int] = Pools(model.config)
    tokens = {}
    for owner, start in enumerate(starts):
        last, keys, values, _ = model.prefill(start)
        pools.add(owner, keys, values)
        tokens[owner] = [int(model.logits(last[None]).argmax())]
    rows: dict[int, list[np.ndarray]] = {owner: [] for owner in tokens}
    for _ in range(steps):
        using = pools.in_use()
        owners = [owner for pool in using for owner in pool.owners]
        final, states = model.decode(np.array([tokens[owner][-1] for owner in owners]), using, LAYERS)
        for row, (owner, token) in enumerate(zip(owners, model.logits(final).argmax(1), strict=True)):
            rows[owner].append(states[row])
            tokens[owner].append(int(token))
    return [(np.stack(rows[owner]), np.array(tokens[owner])) for owner in tokens]


def test_decoding_in_a_batch_gives_the_bits_of_decoding_alone(model):
    starts = prompts(1, 8, 150)
    together = decode_together(model, starts, 6)
    for start, (rows, tokens) in zip(starts, together, strict=True):
        [(alone, same_tokens)] = decode_together(model, [start], 6)
        assert np.array_equal(rows, alone)
        assert np.array_equal(tokens, same_tokens)


def test_a_generated_token_has_the_bits_of_the_same_token_read_in_a_prompt(model):
    starts = prompts(2, 8, 120)
    for start, (rows, tokens) in zip(starts, decode_together(model, starts, 10), strict=True):
        *_, states = model.prefill(np.concatenate((start, tokens[:-1])), LAYERS)
        assert np.array_equal(states[len(start) :], rows)


def test_a_sequence_that_outgrows_its_pool_keeps_its_bits(model):
    start = np.random.default_rng(3).integers(0, 2000, size=CAPACITIES[0] - 3)
    [(rows, tokens)] = decode_together(model, [start], 8)
    *_, states = model.prefill(np.concatenate((start, tokens[:-1])), LAYERS)
    assert np.array_equal(states[len(start) :], rows)


@pytest.mark.parametrize("chunk", [1, 7, 200])
def test_the_size_of_chunks_does_not_show(model, chunk):
    [tokens] = prompts(4, 1, 150)
    *_, expected = model.prefill(tokens, LAYERS)
    *_, states = Llama(tiny_model_dir(), chunk_tokens=chunk).prefill(tokens, LAYERS)
    assert np.array_equal(states, expected)


def test_later_tokens_do_not_change_earlier_states(model):
    [tokens] = prompts(5, 1, 150)
    *_, whole = model.prefill(tokens, LAYERS)
    *_, part = model.prefill(tokens[:-7], LAYERS)
    assert np.array_equal(whole[:-7], part)


def test_rounding_is_to_the_nearest_bfloat16_and_to_even_in_between():
    # every 17-bit integer: all bfloat16 numbers of a few binades, all that lie between two, all ties
    exact = np.concatenate((np.arange(1 << 17), -np.arange(1 << 17))).astype(np.float64) * 2.0**-9
    bits = exact.astype(np.float32).view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(to_bits(rounded(exact)), expected)
