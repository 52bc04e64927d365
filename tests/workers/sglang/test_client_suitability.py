"""Which server a run may use, and the flag that each refusal names."""

from typing import Any

import pytest
from test_client_facts import PLUGIN, facts_of

from storage.errors import UnsuitableError
from storage.run import CaptureSpec
from storage.settings import UNQUANTIZED, Checkpoint
from workers.sglang.suitability import Needs, check_suitable, same_model

FINAL = CaptureSpec(name="final", hs_indices=(8,), norm="post", hidden_size=128)
AUX = CaptureSpec(name="aux", hs_indices=(2, 4, 5), norm="none", hidden_size=128)
PLAIN = Checkpoint(num_layers=8, auto_kv=UNQUANTIZED)
INT4 = Checkpoint(num_layers=8, quantization="compressed-tensors", auto_kv=UNQUANTIZED)
FP8_KV = Checkpoint(num_layers=8, quantization="modelopt", auto_kv="fp8")
OTHER = CaptureSpec(name="hs-1-3-5", hs_indices=(1, 3, 5), norm="none", hidden_size=128)
EAGLE3 = CaptureSpec(name="eagle3", hs_indices=(2, 4, 5, 8), norm="post", hidden_size=128)


def needs(**changed: Any) -> Needs:
    usual = {
        "model": "tiny-llama",
        "vocab_size": 2000,
        "input_tokens": 2042,
        "capture": None,
        "checkpoint": PLAIN,
    }
    return Needs(**{**usual, **changed})


@pytest.mark.parametrize(
    ("flavour", "info", "asked"),
    [
        ("off", {}, {}),
        ("off", {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "d"}, {}),
        ("final", {}, {"capture": FINAL}),
        ("aux", {}, {"capture": AUX}),
        ("aux", {"return_aux_hidden_state_layer_ids": [1, 3, 4]}, {"capture": AUX}),
        ("off", {"eyas": PLUGIN}, {"capture": EAGLE3}),
        ("chunked", {"eyas": PLUGIN}, {"capture": FINAL}),
        ("final", {"kv_cache_dtype": "fp8_e4m3"}, {"allow_quantized_kv": True}),
        ("final", {"quantization": "awq", "kv_cache_dtype": "bfloat16"}, {}),
        ("final", {"kv_cache_dtype": "bf16"}, {"checkpoint": Checkpoint()}),
        ("final", {"quantization": "compressed-tensors"}, {"checkpoint": INT4}),
        ("off", {"eyas": PLUGIN}, {"checkpoint": Checkpoint()}),
        ("final", {}, {"checkpoint": FP8_KV, "allow_quantized_kv": True}),
        ("final", {"dp_size": 2, "tp_size": 8}, {"capture": FINAL}),
        ("off", {"pp_size": 2, "attn_cp_size": 2, "dcp_size": 2}, {}),
        ("aux", {"return_aux_hidden_state_layer_ids": [0, 2, 4]}, {"capture": OTHER}),
        ("off", {"eyas": PLUGIN}, {"capture": FINAL}),
    ],
)
def test_a_suitable_server_is_taken(flavour: str, info: dict[str, Any], asked: dict[str, Any]) -> None:
    check_suitable(facts_of(flavour, **info), needs(**asked))


@pytest.mark.parametrize(
    ("flavour", "info", "asked", "code", "flag"),
    [
        ("final", {}, {"model": "org/other"}, "server.other_model", "--model-path org/other"),
        ("final", {"eyas": PLUGIN}, {"vocab_size": 2001}, "server.vocabulary", "--model"),
        ("final", {}, {"input_tokens": 4096}, "server.context", "--context-length"),
        ("final", {"kv_cache_dtype": "fp8_e4m3"}, {}, "server.quantized_kv", "--kv-cache-dtype bf16"),
        ("final", {"kv_cache_dtype": "fp4_e2m1"}, {}, "server.quantized_kv", "--allow-quantized-kv"),
        ("final", {"eyas": PLUGIN | {"kv_dtype": "fp8_e5m2"}}, {}, "server.quantized_kv", "--kv-cache-dtype"),
        (
            "final",
            {"quantization": "compressed-tensors"},
            {},
            "server.unknown_kv",
            "--kv-cache-dtype bf16",
        ),
        ("final", {}, {"checkpoint": Checkpoint()}, "server.unknown_kv", "--kv-cache-dtype bf16"),
        (
            "final",
            {"quantization": "modelopt"},
            {"checkpoint": Checkpoint(quantization="modelopt")},
            "server.unknown_kv",
            "--allow-quantized-kv",
        ),
        ("final", {}, {"checkpoint": FP8_KV}, "server.quantized_kv", "--kv-cache-dtype bf16"),
        ("final", {"kv_cache_dtype": "nvfp4"}, {}, "server.quantized_kv", "--kv-cache-dtype bf16"),
        ("final", {"kv_cache_dtype": "mxfp8"}, {}, "server.quantized_kv", "--kv-cache-dtype bf16"),
        (
            "final",
            {"eyas": PLUGIN | {"kv_dtype": "fp8_e4m3"}, "kv_cache_dtype": "auto"},
            {"capture": FINAL},
            "server.quantized_kv",
            "--kv-cache-dtype bf16",
        ),
        ("off", {}, {"capture": FINAL}, "server.no_states", "--enable-return-hidden-states"),
        ("final", {}, {"capture": EAGLE3}, "server.not_both", "pip install --no-deps eyas"),
        ("final", {}, {"capture": EAGLE3}, "server.not_both", "--capture aux"),
        ("final", {}, {"capture": AUX}, "server.other_layers", "--enable-return-aux-hidden-states"),
        ("aux", {}, {"capture": FINAL}, "server.other_layers", "--capture aux"),
        (
            "aux",
            {"return_aux_hidden_state_layer_ids": [1, 2, 3]},
            {"capture": AUX},
            "server.other_layers",
            "--return-aux-hidden-state-layer-ids",
        ),
        ("off", {"eyas": PLUGIN | {"plugin": 2}}, {"capture": FINAL}, "server.plugin_version", "eyas"),
        (
            "off",
            {"eyas": PLUGIN | {"hidden_size": 64}},
            {"capture": FINAL},
            "server.other_layers",
            "--capture",
        ),
        ("chunked", {}, {"capture": FINAL}, "server.chunked", "--chunked-prefill-size -1"),
        (
            "final",
            {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "d"},
            {"capture": FINAL},
            "server.speculative",
            "--speculative-algorithm",
        ),
        ("aux", {"pp_size": 2}, {"capture": AUX}, "server.parallel", "--pp-size 1"),
        ("final", {"pp_size": 2}, {"capture": FINAL}, "server.parallel", "--pp-size 1"),
        ("final", {"dcp_size": 2}, {"capture": FINAL}, "server.parallel", "--dcp-size 1"),
        (
            "aux",
            {},
            {"capture": OTHER},
            "server.other_layers",
            "--return-aux-hidden-state-layer-ids 0 2 4",
        ),
        (
            "aux",
            {},
            {"capture": OTHER, "checkpoint": Checkpoint(auto_kv=UNQUANTIZED)},
            "server.other_layers",
            "--return-aux-hidden-state-layer-ids 0 2 4",
        ),
        (
            "off",
            {"eyas": PLUGIN},
            {"capture": OTHER},
            "server.other_layers",
            "--return-aux-hidden-state-layer-ids 0 2 4",
        ),
        (
            "off",
            {"eyas": PLUGIN | {"norm": "pre"}},
            {"capture": FINAL},
            "server.other_layers",
            "install the same eyas",
        ),
        (
            "off",
            {"eyas": PLUGIN, "attn_cp_size": 2},
            {"capture": EAGLE3},
            "server.parallel",
            "--attn-cp-size 1",
        ),
    ],
)
def test_an_unsuitable_server_is_refused_naming_the_flag(
    flavour: str, info: dict[str, Any], asked: dict[str, Any], code: str, flag: str
) -> None:
    with pytest.raises(UnsuitableError) as caught:
        check_suitable(facts_of(flavour, **info), needs(**asked), "http://gpu-1:30000")
    assert caught.value.code == code
    assert flag in str(caught.value.hint)
    assert "http://gpu-1:30000" in caught.value.message


def test_the_layers_of_a_stock_server_are_read_in_its_models_dialect() -> None:
    capture = CaptureSpec(name="hs-2-30-58", hs_indices=(2, 30, 58), norm="none", hidden_size=128)
    asked = needs(capture=capture, checkpoint=Checkpoint(num_layers=61, auto_kv=UNQUANTIZED))
    shifted, plain = (1, 29, 57), (2, 30, 58)
    for architecture, ids in (
        ("LlamaForCausalLM", shifted),
        ("KimiK25ForConditionalGeneration", shifted),
        ("KimiK25ForConditionalGeneration", plain),
    ):
        facts = facts_of("aux", return_aux_hidden_state_layer_ids=ids)
        check_suitable(facts_with(facts, architecture), asked)
    with pytest.raises(UnsuitableError):
        check_suitable(facts_of("aux", return_aux_hidden_state_layer_ids=plain), asked)
    # Left to itself, this one gives hs[3], hs[31] and hs[59].
    odd = facts_with(facts_of("aux"), "MiniMaxM3SparseForConditionalGeneration")
    with pytest.raises(UnsuitableError) as caught:
        check_suitable(odd, asked)
    assert "--return-aux-hidden-state-layer-ids 1 29 57" in str(caught.value.hint)


def facts_with(facts: Any, architecture: str) -> Any:
    return type(facts).from_json(facts.to_json() | {"architecture": architecture})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("moonshotai/Kimi-K2.5", "moonshotai/kimi-k2.5", True),
        ("moonshotai/Kimi-K2.5", "/data/models/Kimi-K2.5/", True),
        ("/hub/models--moonshotai--Kimi-K2.5/snapshots/0a1b2c", "moonshotai/Kimi-K2.5", True),
        ("/hub/models--moonshotai--Kimi-K2.5/snapshots/0a1b2c", "other/Kimi-K2.5", False),
        ("/hub/models--a--m/snapshots/1", "/mnt/models--a--m/snapshots/2", True),
        ("/hub/models--moonshotai--Kimi-K2.5/snapshots/0a1b2c", "/data/Kimi-K2.5", True),
        ("/a/model", "/b/model", True),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", False),
        ("Qwen/Qwen3-8B", "unsloth/Qwen3-8B", False),
        ("/data/Qwen3-8B", "Qwen/Qwen3-4B", False),
        ("gpt2", "gpt2", True),
        ("gpt2", "/models/gpt2", True),
    ],
)
def test_one_model_has_many_names(one: str, other: str, same: bool) -> None:
    assert same_model(one, other) is same
    assert same_model(other, one) is same
