"""Computes what transformers says of the tiny model, into `golden.npz`; run by hand where torch is.

    PYTHONPATH=. python tests/workers/engine/make_golden.py $(python -m workers.engine --print-model-dir)

Greedy tokens are those of the model in bfloat16 with its output head applied in float64. Prompts are
chosen so that every token wins clearly: two logits nearer than the noise of bfloat16 have no right order,
and no two implementations agree on it.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

OUT = Path(__file__).parent / "golden.npz"
LENGTHS = (1, 5, 23, 60, 130)
"""Tokens of each prompt: one token, and more than one of the engine's chunks."""
NEW_TOKENS = 24
CLEAR = 0.12
"""By how much every token's logit wins; logits deviate by 2.5, and bfloat16 moves them by about 0.03."""


def prompt(length: int, variant: int) -> list[int]:
    """Ids all over the vocabulary, the same everywhere."""
    return [
        (7 + 131 * length + 31 * variant + 577 * index + 13 * index * index) % 1993 + 7
        for index in range(length)
    ]


def continued(model: torch.nn.Module, ids: list[int]) -> list[int] | None:
    """The prompt with its greedy continuation; None as soon as a token does not win clearly."""
    head = model.lm_head.weight.double()
    for _ in range(NEW_TOKENS):
        out = model.model(torch.tensor([ids]))
        best = (head @ out.last_hidden_state[0, -1].double()).topk(2)
        if best.values[0] - best.values[1] < CLEAR:
            return None
        ids = [*ids, int(best.indices[0])]
    return ids


def main() -> None:
    """Compute and write."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    kept: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for length in LENGTHS:
            found = (continued(model, prompt(length, variant)) for variant in range(1000))
            ids = next(ids for ids in found if ids is not None)
            out = model.model(torch.tensor([ids[:-1]]), output_hidden_states=True)
            states = torch.stack([*out.hidden_states[:-1], out.last_hidden_state])[:, 0]
            kept[f"ids_{length}"] = np.array(ids, dtype=np.int32)
            # [n + 1, T, H] bits; the last is post-norm, the layers before it are the residual stream's
            kept[f"states_{length}"] = states.contiguous().view(torch.int16).numpy().view(np.uint16)
    np.savez_compressed(OUT, **kept)


if __name__ == "__main__":
    main()
