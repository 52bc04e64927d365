"""What a model's files say of its KV cache, from configs as published checkpoints have them."""

import json
from pathlib import Path
from typing import Any

import pytest

from producer.checkpoint import read_checkpoint
from producer.datasets.model_folder import ModelFolder
from storage.settings import UNQUANTIZED, Checkpoint

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}
INT4 = {"quant_method": "compressed-tensors", "kv_cache_scheme": None}
FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def checkpoint(folder: Path, config: dict[str, Any], beside: dict[str, Any] | None = None) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(config))
    if beside:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    return read_checkpoint(ModelFolder(model="m", path=folder))


@pytest.mark.parametrize(
    ("config", "auto_kv"),
    [
        (LLAMA, UNQUANTIZED),
        (LLAMA | {"quantization_config": INT4}, UNQUANTIZED),
        (LLAMA | {"quantization_config": INT4 | {"kv_cache_scheme": FP8_SCHEME}}, "fp8"),
        (LLAMA | {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, "fp8"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, None),
        (LLAMA | {"index_topk": 2048}, None),
        ({"architectures": ["DeepseekV4ForCausalLM"], "num_hidden_layers": 61}, None),
        (
            {
                "architectures": ["KimiK25ForConditionalGeneration"],
                "text_config": {"num_hidden_layers": 61, "quantization_config": INT4},
            },
            UNQUANTIZED,
        ),
        ({}, None),
    ],
)
def test_what_a_cache_left_to_auto_becomes(tmp_path: Path, config: dict[str, Any], auto_kv: str) -> None:
    assert checkpoint(tmp_path, config).auto_kv == auto_kv


def test_modelopts_own_file_counts(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, LLAMA, {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"})
    assert found == Checkpoint(num_layers=32, quantization="nvfp4", auto_kv="fp8")


def test_a_folder_without_a_config_says_nothing(tmp_path: Path) -> None:
    assert read_checkpoint(ModelFolder(model="m", path=tmp_path)) == Checkpoint()
