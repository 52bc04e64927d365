"""Writes a random Llama with tokenizer and chat template: `make_model.py FOLDER`, in SGLang's Python.

Eight blocks, so that EAGLE-3's three layers differ. The weights are spread wider than those of a model
that begins its training: a row that was computed after other tokens is then far from the right one,
while what bf16 rounds away changes little. Norms have weights too, so that a state before its norm is
no multiple of the one after it.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<begin>", "<end>", "<user>", "<answer>", "<over>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<answer>' if message.role == 'assistant' else '<user>' }}{{ message.content }}<over>"
    "{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
CONTEXT = 2048


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and what is frequent in this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<begin>",
        eos_token="<end>",
        model_max_length=CONTEXT,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_model(vocab_size: int) -> LlamaForCausalLM:
    """The model in bf16; the same one at every call."""
    torch.manual_seed(23)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.mul_(torch.rand_like(weight) + 0.5)
    return model.to(torch.bfloat16)


def main() -> None:
    """Write both to the folder."""
    folder = Path(sys.argv[1])
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(len(tokenizer)).save_pretrained(folder)


if __name__ == "__main__":
    main()
