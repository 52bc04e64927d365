"""The Llama forward pass in NumPy: float64 sums, rounded to bfloat16 where Hugging Face's bf16 model rounds.

It knows token ids, keys and values, and states; not requests, sampling or HTTP. One token's numbers
do not depend on what else is computed beside it (`bf16.py` says why), so prefill and decode, chunks
and batches all give the same bits.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.engine.bf16 import Bits, Floats, rounded, to_bits
from workers.engine.kvcache import Pool
from workers.engine.model_config import ModelConfig, read_config
from workers.engine.safetensors_file import read_tensors

CHUNK_TOKENS = 64
"""Most tokens of one prompt computed at once: OpenBLAS has its fastest kernels for such small products."""
SCORES_LIMIT = 4_000_000
"""Most attention scores held at once, 8 bytes each: chunks get shorter where prompts are long."""
Prefilled = tuple[Floats, Floats, Floats, Bits | None]
"""The last token's final state [H], keys [layers, kv, D, T], values [layers, kv, T, D], and the states of
the indices that were to be captured [T, L, H], or None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One block's weights, each [in, out] float64."""

    attention_norm: Floats
    qkv: Floats
    """Queries, keys and values side by side: [H, (heads + 2 · kv_heads) · D]."""
    output: Floats
    mlp_norm: Floats
    gate: Floats
    up: Floats
    down: Floats


class Llama:
    """A loaded model."""

    def __init__(self, folder: Path, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._chunk_tokens = chunk_tokens
        self.config = read_config(folder)
        self._load(folder)
        self._rope_cos, self._rope_sin = _rope_table(self.config, 1024)

    def _load(self, folder: Path) -> None:
        config, tensors = self.config, read_tensors(folder)

        def matrix(*names: str) -> Floats:
            parts = [tensors.pop(f"{name}.weight") for name in names]
            return np.ascontiguousarray(np.concatenate(parts).T, dtype=np.float64)

        def vector(name: str) -> Floats:
            return tensors.pop(f"{name}.weight").astype(np.float64)

        self.embedding = tensors.pop("model.embed_tokens.weight").astype(np.float64)
        self.layers = []
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            self.layers.append(
                Layer(
                    attention_norm=vector(f"{prefix}.input_layernorm"),
                    qkv=matrix(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
                    output=matrix(f"{attention}.o_proj"),
                    mlp_norm=vector(f"{prefix}.post_attention_layernorm"),
                    gate=matrix(f"{mlp}.gate_proj"),
                    up=matrix(f"{mlp}.up_proj"),
                    down=matrix(f"{mlp}.down_proj"),
                )
            )
        self.final_norm = vector("model.norm")
        self.head = np.ascontiguousarray(self.embedding.T) if config.tied else matrix("lm_head")

    def prefill(self, tokens: NDArray[np.int64], capture: Sequence[int] = ()) -> Prefilled:
        """Run a whole sequence; what comes back is told at `Prefilled`."""
        chunks = self.prefilling(tokens, capture)
        while True:
            try:
                next(chunks)
            except StopIteration as done:
                prefilled: Prefilled = done.value
                return prefilled

    def prefilling(
        self, tokens: NDArray[np.int64], capture: Sequence[int] = ()
    ) -> Generator[int, None, Prefilled]:
        """Run a whole sequence, stopping after each chunk but the last; yields the tokens left."""
        config, count = self.config, len(tokens)
        keys = np.empty((config.num_layers, config.num_kv_heads, config.head_dim, count))
        values = np.empty((config.num_layers, config.num_kv_heads, count, config.head_dim))
        states = np.empty((count, len(capture), config.hidden_size), np.uint16) if capture else None
        start = 0
        while True:
            room = SCORES_LIMIT // (config.num_heads * min(count, start + self._chunk_tokens))
            end = min(count, start + min(self._chunk_tokens, max(16, room)))
            last = self._prefill_chunk(tokens[start:end], start, keys, values, capture, states)
            if end == count:
                return last, keys, values, states
            start = end
            yield count - end

    def _prefill_chunk(
        self,
        tokens: NDArray[np.int64],
        start: int,
        keys: Floats,
        values: Floats,
        capture: Sequence[int],
        states: Bits | None,
    ) -> Floats:
        config, rows = self.config, len(tokens)
        end = start + rows
        groups = config.num_heads // config.num_kv_heads
        positions = np.arange(start, end)
        cos, sin = self._rope(positions)
        later = np.triu(np.full((rows, rows), -np.inf), 1)
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            if states is not None:
                _keep(states, x, index, capture, start)
            query, key, value = self._project(x, layer, cos, sin)
            keys[index, :, :, start:end] = key.transpose(1, 2, 0)
            values[index, :, start:end] = value.transpose(1, 0, 2)
            # [rows, heads, D] as [kv, groups · rows, D]: one product a key-value head
            query = query.reshape(rows, config.num_kv_heads, groups, config.head_dim).transpose(1, 2, 0, 3)
            query = query.reshape(config.num_kv_heads, groups * rows, config.head_dim)
            scores = np.matmul(query, keys[index, :, :, :end])
            scores = scores.reshape(config.num_kv_heads, groups, rows, end)
            scores[..., start:] += later
            weights, totals = _softmax(scores)
            weights = weights.reshape(config.num_kv_heads, groups * rows, end)
            mixed = np.matmul(weights, values[index, :, :end])
            mixed /= totals.reshape(config.num_kv_heads, groups * rows, 1)
            mixed = mixed.reshape(config.num_kv_heads, groups, rows, config.head_dim).transpose(2, 0, 1, 3)
            x = self._finish_layer(x, mixed.reshape(rows, -1), layer)
        final = self._norm(x, self.final_norm)
        if states is not None:
            _keep(states, final, config.num_layers, capture, start)
        last: Floats = final[-1]
        return last

    def decode(
        self, tokens: NDArray[np.int64], pools: Sequence[Pool[Any]], capture: Sequence[int] = ()
    ) -> tuple[Floats, Bits | None]:
        """Run one more token of every sequence in `pools`, in their order.

        Appends its keys and values. Returns final states [B, H] and captured states [B, L, H] or None.
        """
        config, rows = self.config, len(tokens)
        groups = config.num_heads // config.num_kv_heads
        cos, sin = self._rope(np.concatenate([pool.lengths[: pool.count] for pool in pools]))
        bounds = np.cumsum([0, *(pool.count for pool in pools)])
        states = np.empty((rows, len(capture), config.hidden_size), np.uint16) if capture else None
        for pool in pools:
            pool.lengths[: pool.count] += 1
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            if states is not None:
                _keep(states, x, index, capture, 0)
            query, key, value = self._project(x, layer, cos, sin)
            query = query.reshape(rows, config.num_kv_heads, groups, config.head_dim)
            mixed = np.empty((rows, config.num_kv_heads, groups, config.head_dim))
            for pool, first, past in zip(pools, bounds[:-1], bounds[1:], strict=True):
                keys, values, beyond = pool.append(index, key[first:past], value[first:past])
                scores = np.matmul(query[first:past], keys)
                scores += beyond
                weights, totals = _softmax(scores)
                np.divide(np.matmul(weights, values), totals, out=mixed[first:past])
            x = self._finish_layer(x, mixed.reshape(rows, -1), layer)
        final = self._norm(x, self.final_norm)
        if states is not None:
            _keep(states, final, config.num_layers, capture, 0)
        return final, states

    def logits(self, final: Floats) -> Floats:
        """[B, H] final states → [B, vocabulary], bf16 values as a bf16 server has them."""
        return rounded(final @ self.head)

    def _project(self, x: Floats, layer: Layer, cos: Floats, sin: Floats) -> tuple[Floats, Floats, Floats]:
        """Queries [rows, heads, D] with the softmax' scale in them, keys and values [rows, kv, D]."""
        config = self.config
        mixed = rounded(self._norm(x, layer.attention_norm) @ layer.qkv).reshape(len(x), -1, config.head_dim)
        turned = mixed[:, : config.num_heads + config.num_kv_heads]
        half = config.head_dim // 2
        swapped = np.concatenate((-turned[..., half:], turned[..., :half]), axis=-1)
        turned = rounded(rounded(turned * cos) + rounded(swapped * sin))
        query = turned[:, : config.num_heads] * config.head_dim**-0.5
        return query, turned[:, config.num_heads :], mixed[:, config.num_heads + config.num_kv_heads :]

    def _finish_layer(self, x: Floats, mixed: Floats, layer: Layer) -> Floats:
        x = rounded(x + rounded(rounded(mixed) @ layer.output))
        normed = self._norm(x, layer.mlp_norm)
        gate, up = rounded(normed @ layer.gate), rounded(normed @ layer.up)
        gate = rounded(gate / (1.0 + np.exp(-gate)))
        gate *= up
        return rounded(x + rounded(rounded(gate) @ layer.down))

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        mean_square = np.einsum("ij,ij->i", x, x) / x.shape[1]
        scale = 1.0 / np.sqrt(mean_square + self.config.rms_eps)
        return rounded(rounded(x * scale[:, None]) * weight)

    def _rope(self, positions: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Cosines and sines [rows, 1, D] of the positions."""
        needed = int(positions.max()) + 1
        if needed > len(self._rope_cos):
            self._rope_cos, self._rope_sin = _rope_table(self.config, 2 * needed)
        return self._rope_cos[positions, None], self._rope_sin[positions, None]


def _rope_table(config: ModelConfig, positions: int) -> tuple[Floats, Floats]:
    """Cosines and sines [positions, D], rounded to bf16 as transformers hands them to a bf16 model."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** -(np.arange(half, dtype=np.float64) / half)
    angles = np.arange(positions)[:, None] * frequencies[None, :]
    angles = np.concatenate((angles, angles), axis=1)
    return rounded(np.cos(angles)), rounded(np.sin(angles))


def _softmax(scores: Floats) -> tuple[Floats, Floats]:
    """Over the last axis, in place: weights and what to divide by; -inf becomes exactly 0."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return scores, scores.sum(axis=-1, keepdims=True)


def _keep(states: Bits, x: Floats, index: int, capture: Sequence[int], start: int) -> None:
    for place, wanted in enumerate(capture):
        if wanted == index:
            states[start : start + len(x), place] = to_bits(x)
