"""A checkpoint's output head: what log-probabilities and what size its final states must have.

`lm_head @ final` are the logits, so the log-probabilities that a server says can be computed again
from the final states it gave: rows of another request, shifted, or taken before the norm do not
give them. Never downloads anything; without the checkpoint on this machine there is no head.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workers.sglang.audit.checkpoint import CheckpointError, Tensor, find_tensor, read_config

BLOCK_BYTES = 16 << 20
"""Float32 bytes of the head's rows that are held at once."""
PREFIXES = ("", "language_model.", "model.language_model.")
"""Of the text part's tensors; the latter two where a model has a vision part too."""
SCALED = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "dim_model_base",
    "mup_width_multiplier",
)
"""Keys of a `config.json` whose models do more to their logits than multiply."""
OFFSET_NORMS = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next")
"""Model types whose norm multiplies by 1 + weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """The last two steps of a model."""

    weight: Tensor
    """[V, H]."""
    norm: NDArray[np.float32]
    """What the final norm multiplies by, [H]."""
    vocab_size: int
    """Rows of the head that are tokens."""

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.weight.shape[1]

    def logprobs(
        self, final: NDArray[np.float32], tokens: NDArray[np.int32], block_bytes: int = BLOCK_BYTES
    ) -> NDArray[np.float64]:
        """The natural log-probability of token i behind final state i, [k].

        `final` is float32 [k, H]. Holds a block of the head and its logits at once.
        """
        count = len(final)
        most, total = np.full(count, -np.inf), np.zeros(count)
        chosen = np.full(count, -np.inf)
        step = max(1, block_bytes // (4 * self.hidden_size))
        for start in range(0, self.vocab_size, step):
            stop = min(self.vocab_size, start + step)
            logits = (final @ self.weight.rows(start, stop).T).astype(np.float64)
            higher = np.maximum(most, logits.max(axis=1))
            total = total * np.exp(most - higher) + np.exp(logits - higher[:, None]).sum(axis=1)
            most = higher
            here = np.flatnonzero((tokens >= start) & (tokens < stop))
            chosen[here] = logits[here, tokens[here] - start]
        found: NDArray[np.float64] = chosen - most - np.log(total)
        return found


def find_head(model: str) -> OutputHead:
    """The head of this model, a folder or a hub id whose files are on this machine.

    Raises `CheckpointError` saying why there is none to use.
    """
    folder = model_folder(model)
    config = read_config(folder)
    for key in SCALED:
        if config.get(key):
            raise CheckpointError(f"its logits are changed by `{key}`")
    heads = [f"{prefix}lm_head.weight" for prefix in PREFIXES]
    embeddings, norms = _text_parts("embed_tokens.weight"), _text_parts("norm.weight")
    tied = config.get("tie_word_embeddings")
    weight = None if tied else find_tensor(folder, heads)
    if weight is None and tied is not False:  # some models do not say that they are tied
        weight = find_tensor(folder, embeddings)
    norm = find_tensor(folder, norms)
    if weight is None or norm is None:
        raise CheckpointError("it has no `lm_head.weight` or no `model.norm.weight` under a known name")
    if len(weight.shape) != 2 or norm.shape != (weight.shape[1],):
        raise CheckpointError("the shapes of head and norm do not fit")
    scale = norm.rows(0, norm.shape[0])
    if config.get("model_type") in OFFSET_NORMS:
        scale = scale + 1
    known = config.get("vocab_size")
    rows = min(weight.shape[0], known) if isinstance(known, int) and known > 0 else weight.shape[0]
    return OutputHead(weight=weight, norm=scale, vocab_size=rows)


def _text_parts(name: str) -> list[str]:
    return [f"{prefix}{inner}{name}" for prefix in PREFIXES for inner in ("model.", "")]


def model_folder(model: str) -> Path:
    """Where the model's files are on this machine. Raises `CheckpointError`."""
    folder = Path(model)
    # A server's relative path means something in its own working folder, not in ours.
    if folder.is_absolute():
        if folder.is_dir():
            return folder
        raise CheckpointError("its folder is not on this machine")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        config = None
    if isinstance(config, str):
        return Path(config).parent
    raise CheckpointError("it is not in this machine's Hugging Face cache")
