"""The bundled model: the same bytes everywhere, complete, with a tokenizer and template that fit."""

import hashlib
import json
import threading

import numpy as np
import pytest

from storage.errors import UnsuitableError
from workers.engine import tiny_model_dir
from workers.engine.bf16 import from_bits
from workers.engine.model_config import read_config
from workers.engine.safetensors_file import read_tensors, write_tensors
from workers.engine.tiny_model import make_tiny_model


def test_the_weights_have_the_same_bytes_on_every_machine():
    data = (tiny_model_dir() / "model.safetensors").read_bytes()
    assert (
        hashlib.sha256(data).hexdigest() == "dd765818e59f7367f9d3aeda90e6d6b620472961c28a4acd2c95eb7b3da8d46d"
    )


def test_processes_that_make_it_at_once_end_with_one_whole_folder(tmp_path):
    made = []
    threads = [threading.Thread(target=lambda: made.append(make_tiny_model(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert list(tmp_path.iterdir()) == [made[0]]
    assert {file.name for file in made[0].iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        "model.safetensors",
    }


def test_transformers_reads_its_tokenizer_and_template():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_dir()))
    config = read_config(tiny_model_dir())
    assert len(tokenizer) == config.vocab_size
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (config.eos_ids[0], config.bos_id)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Wieviel ist 12 × 3? 你好"},
        {"role": "assistant", "content": "36"},
        {"role": "tool", "content": "ok"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>\nBe brief.<|end|>\n<|user|>\nWieviel ist 12 × 3? 你好<|end|>\n"
        "<|assistant|>\n36<|end|>\n<|tool|>\nok<|end|>\n<|assistant|>\n"
    )
    encoded = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=True
    )
    assert tokenizer.decode(encoded["input_ids"]) == text
    marked = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "36<|end|>"


def test_the_library_reads_what_was_written_and_the_engine_what_the_library_wrote(tmp_path):
    import safetensors.numpy

    bits = np.arange(24, dtype=np.uint16).reshape(4, 6) + 0x3F80
    write_tensors(tmp_path / "a.safetensors", {"x": bits, "y": bits[0]})
    [(_, x), (_, y)] = sorted(safetensors.deserialize((tmp_path / "a.safetensors").read_bytes()))
    assert (x["dtype"], x["shape"], bytes(x["data"])) == ("BF16", [4, 6], bits.tobytes())
    assert bytes(y["data"]) == bits[0].tobytes()

    assert np.array_equal(read_tensors(tmp_path)["x"], from_bits(bits))

    written = {"half": np.array([0.5, -2], "<f2"), "single": np.array([[1.5], [3e38]], "<f4")}
    (tmp_path / "b").mkdir()
    safetensors.numpy.save_file(written, tmp_path / "b" / "m.safetensors")
    read = read_tensors(tmp_path / "b")
    assert read["half"].tolist() == [0.5, -2.0]
    assert np.array_equal(read["single"], written["single"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "llama3"),
    ],
)
def test_a_model_the_engine_would_run_wrongly_is_refused(tmp_path, change, named):
    config = json.loads((tiny_model_dir() / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsuitableError, match=named):
        read_config(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(UnsuitableError, match="safetensors"):
        read_tensors(tmp_path)
