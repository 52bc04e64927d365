"""Writes a random Llama that is wide and shallow: `wide_model.py FOLDER HIDDEN LAYERS`, in SGLang's Python.

Hidden states weigh most against little computing, so this is the hardest model for a capture.
No tokenizer: the benchmark sends ids. float32, which a CPU computes fastest.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 2048
CONTEXT = 4096


def main() -> None:
    """Write it."""
    folder, hidden, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    main()
