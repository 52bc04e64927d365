"""What the engine takes from a checkpoint's `config.json`; a model it cannot run exactly is refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import UnsuitableError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A `LlamaForCausalLM`, in its own words."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    max_positions: int
    """Longest context in tokens."""
    tied: bool
    """Whether the output head is the embedding."""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """Tokens that end a response, `generation_config.json` included."""
    architecture: str = "LlamaForCausalLM"
    model_type: str = "llama"

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """EAGLE-3's auxiliary layers as indices of Hugging Face's `hidden_states`, ascending.

        SGLang's own default: 2, n // 2, n - 3; distinct from seven layers on.
        """
        return (2, self.num_layers // 2, self.num_layers - 3)


def read_config(folder: Path) -> ModelConfig:
    """The model in `folder`.

    Raises `UnsuitableError` for a folder without `config.json` and for what is not a plain Llama.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise UnsuitableError(
            f"no `config.json` in `{folder}`",
            code="engine.model",
            hint="give --model the folder of a LlamaForCausalLM checkpoint, or leave it out",
        ) from None
    if "LlamaForCausalLM" not in config.get("architectures", []):
        raise UnsuitableError(
            f"the embedded engine runs `LlamaForCausalLM`, not `{config.get('architectures')}`",
            code="engine.model",
            hint="serve other models with SGLang and give its address with --server-url",
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _expect(config.get("hidden_act", "silu") == "silu", "hidden_act", config.get("hidden_act"))
    _expect(rope.get("rope_type", "default") == "default", "rope_type", rope.get("rope_type"))
    _expect(not config.get("attention_bias"), "attention_bias", True)
    _expect(not config.get("mlp_bias"), "mlp_bias", True)
    heads = config["num_attention_heads"]
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rms_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        max_positions=config.get("max_position_embeddings", 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        bos_id=config.get("bos_token_id"),
        eos_ids=_eos_ids(config, folder / "generation_config.json"),
    )


def _eos_ids(config: dict[str, Any], generation: Path) -> tuple[int, ...]:
    ids: set[int] = set()
    settings = [config]
    if generation.exists():
        settings.append(json.loads(generation.read_bytes()))
    for setting in settings:
        found = setting.get("eos_token_id")
        ids.update([found] if isinstance(found, int) else found or [])
    return tuple(sorted(ids))


def _expect(holds: bool, key: str, value: object) -> None:
    if not holds:
        raise UnsuitableError(
            f"the embedded engine does not run `{key}` = `{value}`",
            code="engine.model",
            hint="serve this model with SGLang and give its address with --server-url",
        )
