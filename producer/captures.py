"""Captures: which hidden states a name stands for, in Hugging Face's indices.

`hs[0]` is the embedding, `hs[n]` of a model with n blocks the final state. EAGLE-3's layers are
hs[2], hs[n // 2] and hs[n - 3] in every trainer. A server that runs the plugin says which layers
its model really gives, and is believed before any formula.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage.errors import UnsuitableError, UsageError
from storage.run import CaptureSpec
from workers.sglang.facts import ServerFacts

NAMES = ("eagle3", "aux", "final")
FEWEST_BLOCKS = 7
"""With fewer, two of EAGLE-3's three layers are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What a capture depends on; None where nobody says."""

    num_layers: int | None
    """n, blocks."""
    hidden_size: int | None
    """H."""


def sizes_of(config: Mapping[str, Any], facts: ServerFacts | None = None) -> ModelSizes:
    """The sizes, from the server's plugin before the model's `config.json`."""
    if facts is not None and facts.plugin is not None:
        return ModelSizes(num_layers=facts.plugin.num_layers, hidden_size=facts.plugin.hidden_size)
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    return ModelSizes(
        num_layers=layers if isinstance(layers, int) else None,
        hidden_size=hidden if isinstance(hidden, int) else None,
    )


def check_capture(text: str) -> None:
    """Raises `UsageError` when `--capture` says nothing that could be captured."""
    if text not in NAMES:
        _indices(text)


def resolve_capture(text: str, sizes: ModelSizes, facts: ServerFacts | None = None) -> CaptureSpec:
    """The capture that `--capture` names on this model.

    Raises `UsageError` for indices it does not have, `UnsuitableError` when its sizes are unknown.
    """
    n, hidden = sizes.num_layers, sizes.hidden_size
    if n is None or hidden is None:
        raise UnsuitableError(
            "neither the server nor a `config.json` says how many layers the model has",
            code="model.sizes",
            hint="name its hub id or a folder with its `config.json` by `--model`",
        )
    given = facts.plugin.hs_indices if facts is not None and facts.plugin is not None else {}
    if text in given:
        indices = given[text]
    elif text in NAMES:
        if text != "final" and n < FEWEST_BLOCKS:
            raise UnsuitableError(
                f"a model of `{n}` layers has no three of EAGLE-3's",
                code="model.sizes",
                hint="--capture final",
            )
        indices = {"aux": (2, n // 2, n - 3), "final": (n,)}.get(text, (2, n // 2, n - 3, n))
    else:
        indices = _indices(text)
        if indices[-1] > n:
            raise UsageError(
                f"`--capture {text}` asks for hidden state `{indices[-1]}` of a model of `{n}` layers",
                code="capture.layers",
                hint=f"indices run from 0, the embedding, to {n}, the final state",
            )
    norm = facts.plugin.norm if facts is not None and facts.plugin is not None else "post"
    return CaptureSpec(
        name=text if text in NAMES else "hs-" + "-".join(str(i) for i in indices),
        hs_indices=tuple(sorted(indices)),
        norm=norm if n in indices else "none",
        hidden_size=hidden,
    )


def _indices(text: str) -> tuple[int, ...]:
    try:
        indices = sorted({int(part) for part in text.removeprefix("hs-").replace("-", ",").split(",")})
    except ValueError:
        indices = []
    if not indices or indices[0] < 0:
        raise UsageError(
            f"`--capture {text}` is none that is known",
            code="capture.unknown",
            hint="eagle3, aux, final, or Hugging Face hidden-state indices such as 2,16,29",
        )
    return tuple(indices)
