"""Ids of auxiliary layers: what each means, and which are suggested. Real classes: `tests/sglang`."""

import itertools

import pytest

from workers.sglang.layer_ids import ids_of, layers_of, said_ids

KIMI, LLAMA, GPT_OSS = "KimiK25ForConditionalGeneration", "LlamaForCausalLM", "GptOssForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "ids", "layers"),
    [
        (LLAMA, (1, 3, 4), (2, 4, 5)),
        (LLAMA, (4, 1, 3), (2, 4, 5)),
        (KIMI, (1, 29, 57), (2, 30, 58)),
        (KIMI, (2, 30, 58), (2, 30, 58)),
        (KIMI, (0, 30, 58), (0, 30, 58)),
        (GPT_OSS, (1, 11, 20), (2, 12, 21)),
        (GPT_OSS, (2, 12, 24), (2, 12, 24)),
        (None, (1,), (2,)),
    ],
)
def test_ids_mean_what_sglang_makes_of_them(
    architecture: str | None, ids: tuple[int, ...], layers: tuple[int, ...]
) -> None:
    assert layers_of(ids, architecture, 61 if architecture == KIMI else 24) == layers


@pytest.mark.parametrize("architecture", [LLAMA, KIMI, GPT_OSS, "DeepseekV2ForCausalLM"])
def test_ids_that_are_suggested_give_what_was_asked_for_and_never_the_block_that_kills(
    architecture: str,
) -> None:
    n = 9
    suggested = 0
    for size in (1, 2, 3):
        for layers in itertools.combinations(range(n + 1), size):
            ids = ids_of(layers, architecture, n)
            if ids is None:
                continue
            suggested += 1
            assert layers_of(ids, architecture, n) == layers
            assert max(layers) < n, "after the last block comes the final state, which needs no id"
    if architecture in (LLAMA, GPT_OSS):
        assert suggested == 8 + 28 + 56, "all of hs[1] to hs[8]"
    else:
        assert suggested == 7 + 21 + 35, "a list cannot begin with hs[1]"


def test_the_flags_for_eagle3s_own_layers_name_no_ids() -> None:
    assert said_ids((2, 30, 58), KIMI, 61) == (
        "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3"
    )
    assert str(said_ids((2, 30, 58), LLAMA, None)).endswith("--return-aux-hidden-state-layer-ids 1 29 57")
    assert said_ids((2, 30, 61), KIMI, 61) is None
    assert said_ids((0, 30), LLAMA, 61) is None
