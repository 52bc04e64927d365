"""SGLang's ids of auxiliary layers against Hugging Face's indices: they differ, and not by model alike.

`--return-aux-hidden-state-layer-ids k` usually means the output of block k, which is
`hidden_states[k + 1]`. Two families of models read their list otherwise. `tests/sglang` asks the
classes of a real SGLang. With the plugin nobody computes: it reports what the loaded model captures.
"""

from collections.abc import Sequence

INDICES_UNLESS_FIRST_IS_ONE = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    }
)
"""Architectures that take the list as hidden-state indices, except one that begins with 1."""
INDICES_IF_LAST_IS_N = frozenset({"GptOssForCausalLM"})
"""Architectures that take the list as indices when its greatest is the number of blocks."""
DEFAULT_IS_SHIFTED = frozenset({"MiniMaxM3SparseForConditionalGeneration"})
"""Architectures whose default is one layer above EAGLE-3's."""

AUXILIARY = "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3"
"""Loads no draft and speculates nothing; without ids the model gives its default layers."""


def default_layers(architecture: str | None, num_layers: int) -> tuple[int, ...]:
    """The indices a model captures when it is given no ids: EAGLE-3's, but for one."""
    off = 1 if architecture in DEFAULT_IS_SHIFTED else 0
    return tuple(sorted({2 + off, num_layers // 2 + off, num_layers - 3 + off}))


def layers_of(ids: Sequence[int], architecture: str | None, num_layers: int | None) -> tuple[int, ...]:
    """The hidden-state indices that a model captures when given these ids, in the order of its rows."""
    as_they_are = bool(ids) and (
        (architecture in INDICES_UNLESS_FIRST_IS_ONE and ids[0] != 1)
        or (architecture in INDICES_IF_LAST_IS_N and max(ids) == num_layers)
    )
    return tuple(sorted({i if as_they_are else i + 1 for i in ids}))


def ids_of(layers: Sequence[int], architecture: str | None, num_layers: int | None) -> tuple[int, ...] | None:
    """The ids that make a model capture these indices; None when no list does.

    Never the last block's: a server given that one starts and dies in its first forward pass. What
    comes after the last block is the final state, which needs no id.
    """
    if not layers or (num_layers is not None and max(layers) >= num_layers) or min(layers) < 1:
        return None
    shifted = tuple(i - 1 for i in sorted(layers))
    for ids in (shifted, tuple(sorted(layers))):
        if layers_of(ids, architecture, num_layers) == tuple(sorted(layers)):
            return ids
    return None


def said_ids(
    layers: Sequence[int], architecture: str | None, num_layers: int | None, *, explicit: bool = False
) -> str | None:
    """The flags that make a server capture these indices; None when no list does.

    Ids are named where the default gives other layers, and where they shall be `explicit`.
    """
    if not explicit and num_layers is not None and tuple(layers) == default_layers(architecture, num_layers):
        return AUXILIARY
    ids = ids_of(layers, architecture, num_layers)
    return (
        None if ids is None else f"{AUXILIARY} --return-aux-hidden-state-layer-ids {' '.join(map(str, ids))}"
    )
