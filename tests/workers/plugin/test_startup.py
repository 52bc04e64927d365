"""What is refused at start, and what a loaded model is said to give."""

from types import SimpleNamespace

import pytest

from storage.errors import UnsuitableError
from workers.plugin.facts import read_model
from workers.plugin.startup import captures, check_arguments
from workers.plugin.versions import TRIED, check_version

GOOD = {
    "return_hidden_states_mode": "full",
    "disable_overlap_schedule": True,
    "cuda_graph_config": {"decode": {"backend": "disabled"}, "prefill": {"backend": "disabled"}},
    "pp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "speculative_algorithm": None,
    "aux_hidden_state_capture": "eagle3",
    "tokenizer_worker_num": 1,
    "disaggregation_mode": "null",
}
CONFIG = SimpleNamespace(num_hidden_layers=8, hidden_size=128, vocab_size=2000)


def model(*layers):
    inner = SimpleNamespace(layers_to_capture=list(layers))
    return SimpleNamespace(modules=lambda: [SimpleNamespace(), inner])


def read(*layers, kv_dtype="torch.bfloat16", kv_name="auto"):
    return read_model(model(*layers), CONFIG, kv_dtype=kv_dtype, kv_name=kv_name)


def test_a_capture_server_as_the_recipe_starts_it_is_taken():
    check_arguments(GOOD, {})


def test_a_server_without_whole_states_is_none_of_our_business():
    assert captures(GOOD)
    assert not captures({"return_hidden_states_mode": "last"})
    assert not captures({"return_hidden_states_mode": None})


@pytest.mark.parametrize(
    ("change", "environ", "flag"),
    [
        ({"disable_overlap_schedule": False}, {}, "--disable-overlap-schedule"),
        (
            {"cuda_graph_config": {"decode": {"backend": "disabled"}, "prefill": {"backend": "breakable"}}},
            {},
            "--disable-cuda-graph",
        ),
        ({"cuda_graph_config": None, "disable_cuda_graph": False}, {}, "--disable-cuda-graph"),
        ({"pp_size": 2}, {}, "--pp-size 1"),
        ({"attn_cp_size": 2}, {}, "--attn-cp-size 1"),
        ({"dcp_size": 4}, {}, "--dcp-size 1"),
        ({"speculative_algorithm": "EAGLE"}, {}, "--speculative-algorithm"),
        ({"aux_hidden_state_capture": "dflash"}, {}, "--speculative-algorithm EAGLE3"),
        ({"tokenizer_worker_num": 4}, {}, "--tokenizer-worker-num 1"),
        ({"disaggregation_mode": "prefill"}, {}, "--disaggregation-mode null"),
        ({}, {"SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER"),
    ],
)
def test_what_would_lose_or_mix_rows_is_refused_with_the_flag_to_change(change, environ, flag):
    with pytest.raises(UnsuitableError) as raised:
        check_arguments(GOOD | change, environ)
    assert flag in raised.value.hint


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(UnsuitableError) as raised:
        check_arguments(
            GOOD
            | {"disable_overlap_schedule": False, "cuda_graph_config": None, "disable_cuda_graph": False},
            {},
        )
    assert "`--disable-overlap-schedule` `--disable-cuda-graph`" in raised.value.hint


def test_an_untried_version_is_refused_naming_those_tried_unless_asked_for():
    check_version(TRIED[0], {})
    with pytest.raises(UnsuitableError, match=r"0\.6\.0 was not tried .* tried: 0\.5\.23"):
        check_version("0.6.0", {})
    check_version("0.6.0", {"EYAS_PLUGIN_ANY_VERSION": "1"})


def test_a_model_with_eagle3s_layers_gives_all_three_captures():
    announced = read(5, 2, 4).announced("node")
    assert announced["hs_indices"] == {"eagle3": [2, 4, 5, 8], "aux": [2, 4, 5], "final": [8]}
    assert announced["plugin"] == 1
    assert announced["norm"] == "post"
    assert announced["num_layers"] == 8
    assert announced["hidden_size"] == 128
    assert announced["vocab_size"] == 2000


def test_other_layers_are_not_called_eagle3():
    assert read(1, 6).captures() == {"final": (8,), "aux": (1, 6)}


def test_a_model_without_auxiliary_layers_gives_the_final_state():
    assert read().captures() == {"final": (8,)}


def test_the_layer_that_would_kill_the_server_is_refused_at_start():
    with pytest.raises(UnsuitableError, match="cannot give auxiliary layer 8"):
        read(2, 4, 8)


@pytest.mark.parametrize(
    ("dtype", "name", "said"),
    [
        ("torch.bfloat16", "auto", "bfloat16"),
        ("torch.bfloat16", None, "bfloat16"),
        ("torch.float8_e4m3fn", "auto", "float8_e4m3fn"),
        ("torch.float8_e4m3fn", "fp8_e4m3", "fp8_e4m3"),
        ("torch.uint8", "fp4_e2m1", "fp4_e2m1"),
    ],
)
def test_the_kv_cache_is_called_what_it_became(dtype, name, said):
    assert read(kv_dtype=dtype, kv_name=name).kv_dtype == said
