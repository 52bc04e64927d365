"""What the loaded model gives and what `/server_info` says of it under `eyas`.

Indices are Hugging Face's `hidden_states`. SGLang's `layers_to_capture` already are these: it holds
the blocks before which the stream is kept, and the input of block i is `hidden_states[i]`. How
command-line ids become them differs from model to model, so only the loaded model is asked.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from storage.errors import UnsuitableError

PLUGIN_VERSION = 1
"""The agreement with the client; it refuses another (`workers/sglang/suitability.py`)."""
NORM = "post"
"""The final state is what the model gives `lm_head`, so it has passed the final norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The loaded model."""

    aux: tuple[int, ...]
    """Indices of the auxiliary layers it captures, ascending; empty without any."""
    hidden_size: int
    """H."""
    num_layers: int
    """n, the final state's index."""
    vocab_size: int
    kv_dtype: str
    """What the KV cache really is."""

    @property
    def given(self) -> tuple[int, ...]:
        """All indices a request may have, ascending."""
        return (*self.aux, self.num_layers)

    def captures(self) -> dict[str, tuple[int, ...]]:
        """Names of captures and their indices; `eagle3` only when these are EAGLE-3's own layers."""
        named: dict[str, tuple[int, ...]] = {"final": (self.num_layers,)}
        if self.aux:
            named["aux"] = self.aux
        if self.aux == tuple(sorted({2, self.num_layers // 2, self.num_layers - 3})):
            named["eagle3"] = self.given
        return named

    def announced(self, node: str) -> dict[str, Any]:
        """What clients read in `/server_info`."""
        return {
            "plugin": PLUGIN_VERSION,
            "node": node,
            "hs_indices": {name: list(indices) for name, indices in self.captures().items()},
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "norm": NORM,
            "kv_dtype": self.kv_dtype,
            "vocab_size": self.vocab_size,
        }


def read_model(model: Any, config: Any, *, kv_dtype: Any, kv_name: str | None) -> ModelFacts:
    """The facts of a `torch.nn.Module` and its Hugging Face text config.

    Raises `UnsuitableError` when it was told to capture a layer that it cannot give.
    """
    layers = int(config.num_hidden_layers)
    aux = captured_layers(model.modules())
    if aux and aux[-1] >= layers:
        raise UnsuitableError(
            f"this model cannot give auxiliary layer {aux[-1]}: after its {layers} blocks comes the final "
            "state, which every capture has anyway",
            code="server.other_layers",
            hint="leave the last layer out of `--return-aux-hidden-state-layer-ids`",
        )
    return ModelFacts(
        aux=aux,
        hidden_size=int(config.hidden_size),
        num_layers=layers,
        vocab_size=int(config.vocab_size),
        kv_dtype=_kv_name(kv_dtype, kv_name),
    )


def captured_layers(modules: Iterable[Any]) -> tuple[int, ...]:
    """The layers that some module says it captures, ascending; the stream is kept in that order."""
    for module in modules:
        layers = getattr(module, "layers_to_capture", None)
        if layers:
            return tuple(sorted({int(layer) for layer in layers}))
    return ()


def _kv_name(dtype: Any, name: str | None) -> str:
    """`bfloat16`, `fp8_e4m3`, …: SGLang's name where it has one, since fp4 lies in bytes."""
    if name and any(word in name.lower() for word in ("fp8", "fp4", "int8", "int4")):
        return name
    return str(dtype).removeprefix("torch.")
