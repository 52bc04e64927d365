"""Picks one token a sequence out of a batch's logits; a sequence's pick does not depend on the others.

Seeds are stateless: the uniform number for a position is a hash of seed and position, so a request
computed again picks the same.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workers.engine.bf16 import Floats
from workers.engine.order import Sampling


def pick(
    logits: Floats, samplings: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]
) -> NDArray[np.int64]:
    """Token ids [B] out of logits [B, V]; `positions` count each sequence's output tokens."""
    chosen: NDArray[np.int64] = logits.argmax(axis=1)
    rows = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if rows:
        temperatures = np.array([samplings[row].temperature for row in rows])
        uniforms = np.array([uniform(seeds[row], positions[row]) for row in rows])
        weights = logits[rows]
        weights -= weights.max(axis=1, keepdims=True)
        weights /= temperatures[:, None]
        np.exp(weights, out=weights)
        for place, row in enumerate(rows):
            if samplings[row].top_p < 1 or 0 < samplings[row].top_k < logits.shape[1]:
                _restrict(weights[place], samplings[row])
        chosen[rows] = _draw(weights, uniforms)
    return chosen


def logprobs(logits: Floats, tokens: NDArray[np.int64]) -> Floats:
    """The natural log-probability of each row's token, [B], out of logits [B, V]."""
    most = logits.max(axis=1)
    total = np.log(np.exp(logits - most[:, None]).sum(axis=1))
    found: Floats = logits[np.arange(len(tokens)), tokens] - most - total
    return found


def _draw(weights: Floats, uniforms: Floats) -> NDArray[np.int64]:
    """One column a row, with probability in proportion to its weight."""
    cumulative = np.cumsum(weights, axis=1)
    drawn: NDArray[np.int64] = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(axis=1)
    return drawn.clip(max=weights.shape[1] - 1)


def _restrict(weights: Floats, sampling: Sampling) -> None:
    """Zero, in place, what `top_k` and then `top_p` leave out; the likeliest always stays."""
    order = np.argsort(-weights, kind="stable")
    if 0 < sampling.top_k < len(weights):
        weights[order[sampling.top_k :]] = 0.0
    if sampling.top_p < 1:
        ranked = weights[order]
        before = np.cumsum(ranked) - ranked
        weights[order[before >= sampling.top_p * ranked.sum()]] = 0.0


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for one output position: SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return ((mixed ^ (mixed >> 31)) >> 11) / 2**53
