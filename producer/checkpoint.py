"""What a model's own files say that its servers do not: its number of blocks, and its KV cache.

A server started with `--kv-cache-dtype auto` goes on saying `auto`, whatever that became. The
checkpoint decides it, except on some models and chips: those are left unknown here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from producer.datasets.model_folder import ModelFolder
from storage.files import read_json
from storage.settings import UNQUANTIZED, Checkpoint

CHIP_DECIDES = ("index_topk",)
"""Keys of a config whose models SGLang gives an fp8 cache on some chips: sparse attention's."""
SGLANG_DECIDES = frozenset({"DeepseekV4ForCausalLM", "MuseSparkForConditionalGeneration"})
"""Architectures whose `auto` SGLang makes fp8 whatever the checkpoint says."""


def read_checkpoint(folder: ModelFolder) -> Checkpoint:
    """The facts in `config.json` and `hf_quant_config.json`."""
    whole, text = _read(folder, "config.json"), folder.config()
    layers = text.get("num_hidden_layers")
    said = [config.get("quantization_config") for config in (whole, text)]
    said.append(_read(folder, "hf_quant_config.json").get("quantization"))
    quantized = [one for one in said if isinstance(one, Mapping)]
    return Checkpoint(
        num_layers=layers if isinstance(layers, int) else None,
        quantization=_method(quantized[0]) if quantized else None,
        auto_kv=_auto_kv(whole, text, quantized) if text else None,
    )


def _auto_kv(
    whole: Mapping[str, Any], text: Mapping[str, Any], quantized: Sequence[Mapping[str, Any]]
) -> str | None:
    """What a KV cache left to `auto` becomes: a quantized dtype, `UNQUANTIZED`, or None if unknown.

    `whole` is the config, `text` its text part, `quantized` all that is said of quantization.
    """
    architectures = whole.get("architectures") or ()
    if any(text.get(key) is not None for key in CHIP_DECIDES) or SGLANG_DECIDES & set(architectures):
        return None
    if not quantized:
        return UNQUANTIZED
    schemes = [
        one[key] for one in quantized for key in ("kv_cache_scheme", "kv_cache_quant_algo") if key in one
    ]
    if not schemes:
        return None
    named = [scheme for scheme in schemes if scheme]
    return _name(named[0]) if named else UNQUANTIZED


def _method(quantization: Mapping[str, Any]) -> str:
    return str(quantization.get("quant_method") or quantization.get("quant_algo") or "unnamed").lower()


def _name(scheme: object) -> str:
    """`fp8` of ModelOpt's `FP8` or of compressed-tensors' `{"type": "float", "num_bits": 8}`."""
    if isinstance(scheme, Mapping):
        kind = "fp" if scheme.get("type") == "float" else "int"
        return f"{kind}{scheme.get('num_bits', 8)}"
    return str(scheme).lower()


def _read(folder: ModelFolder, name: str) -> Mapping[str, Any]:
    try:
        return read_json(folder.path / name)
    except FileNotFoundError:
        return {}
