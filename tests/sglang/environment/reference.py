"""What transformers computes for stored samples: `reference.py MODEL`, in SGLang's Python.

Each line on stdin is the path of an `.npz` (written by `comparison.py`), each line on stdout what was
found. The weights are the served ones, computed in float32, each sequence alone: nothing of batching,
caching or bf16 arithmetic is in what the served rows are compared with.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def rows_of_transformers(model: Any, tokens: torch.Tensor, hs_indices: list[int]) -> Any:
    """Hidden states float32 [T, L, H], the last index after the final norm; logits float32 [T, V]."""
    out = model(tokens[None], output_hidden_states=True)
    blocks = model.config.num_hidden_layers
    # The tuple's last entry has passed the norm; what lm_head reads is asked for, to be sure of it.
    assert torch.equal(model.lm_head(out.hidden_states[blocks]), out.logits)
    return torch.stack([out.hidden_states[i][0] for i in hs_indices], dim=1), out.logits[0]


def relative_error(served: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """‖served − right‖ ÷ ‖right‖ of each row of each layer."""
    return (served - right).norm(dim=-1) / right.norm(dim=-1)


def compare(model: Any, content: dict[str, Any]) -> dict[str, Any]:
    """Every row of every sample against transformers, and the generated tokens against its argmax."""
    rows = positions = unlike = 0
    worst_cosine, worst_error, worst_margin, shifted = 1.0, 0.0, 0.0, []
    token_starts, row_starts = content["token_offset"], content["row_offset"]
    hs_indices = content["hs_indices"].tolist()
    for number, prompt_length in enumerate(content["prompt_length"]):
        tokens = torch.from_numpy(content["tokens"][token_starts[number] : token_starts[number + 1]]).long()
        states = content["states"][row_starts[number] : row_starts[number + 1]]
        served = torch.from_numpy(states).view(torch.bfloat16).float()
        right, logits = rows_of_transformers(model, tokens, hs_indices)
        right = right[: len(served)]
        cosine = torch.cosine_similarity(served, right, dim=-1)
        error = relative_error(served, right)
        rows += len(served)
        worst_cosine = min(worst_cosine, float(cosine.min()))
        worst_error = max(worst_error, float(error.max()))
        shifted.append(relative_error(served[1:], right[:-1]).flatten())
        said = logits[prompt_length - 1 : -1]
        chosen = said.gather(1, tokens[prompt_length:, None])[:, 0]
        margins = said.max(dim=1).values - chosen
        positions += len(margins)
        unlike += int((margins > 0).sum())
        worst_margin = max(worst_margin, float(margins.max())) if len(margins) else worst_margin
    return {
        "samples": len(content["prompt_length"]),
        "rows": rows,
        "worst_cosine": worst_cosine,
        "worst_error": worst_error,
        "shifted_error": float(torch.cat(shifted).mean()),
        "positions": positions,
        "unlike": unlike,
        "worst_margin": worst_margin,
    }


@torch.inference_mode()
def main() -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    for line in sys.stdin:
        with np.load(line.strip()) as file:
            # Each look into the file reads a whole array.
            content = dict(file)
        sys.stdout.write(json.dumps(compare(model, content)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
