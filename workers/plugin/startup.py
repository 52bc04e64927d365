"""Which ways of starting SGLang the plugin refuses, with the flag to change. Pure.

Only a server that gives whole hidden states is looked at: on any other the plugin does nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from storage.errors import UnsuitableError


def captures(arguments: Mapping[str, Any]) -> bool:
    """Whether the server gives the states of every token (`--enable-return-hidden-states`)."""
    return arguments.get("return_hidden_states_mode") == "full"


def check_arguments(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raises `UnsuitableError` naming everything that keeps this server from capturing right.

    `arguments` are SGLang's, as resolved.
    """
    reasons = list(_reasons(arguments, environ))
    if reasons:
        raise UnsuitableError(
            "eyas: this server gives hidden states, and " + "; ".join(why for why, _ in reasons),
            code="server.parallel",
            hint=f"start it with {' '.join(change for _, change in reasons)}; or, if it shall only generate, "
            "without `--enable-return-hidden-states` and `--enable-return-aux-hidden-states`",
        )


def _reasons(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What is wrong, and the flags that put it right."""
    if not arguments.get("disable_overlap_schedule"):
        yield "the overlap schedule reuses a batch's rows", "`--disable-overlap-schedule`"
    if _graphs(arguments):
        yield "CUDA graphs reuse a batch's rows", "`--disable-cuda-graph`"
    for flag, what in (
        ("pp_size", "no pipeline stage sees all layers"),
        ("attn_cp_size", "no rank of a context-parallel group sees all rows"),
        ("dcp_size", "no rank of a context-parallel group sees all rows"),
    ):
        if (arguments.get(flag) or 1) > 1:
            yield what, f"`--{flag.replace('_', '-')} 1`"
    if arguments.get("speculative_algorithm"):
        yield (
            "speculative decoding makes rows of tokens it rejects",
            "no `--speculative-algorithm`, except for auxiliary layers without a draft "
            "(`--enable-return-aux-hidden-states --speculative-algorithm EAGLE3`)",
        )
    if arguments.get("aux_hidden_state_capture") not in (None, "eagle3"):
        yield "only EAGLE3's way of naming layers is known", "`--speculative-algorithm EAGLE3`"
    if (arguments.get("tokenizer_worker_num") or 1) > 1:
        yield "tokenizer workers load no plugins", "`--tokenizer-worker-num 1`"
    if arguments.get("disaggregation_mode", "null") != "null":
        yield "a disaggregated server has its rows in two places", "`--disaggregation-mode null`"
    if arguments.get("enable_pdmux"):
        yield "split prefills come in parts of layers", "no `--enable-pdmux`"
    if arguments.get("dllm_algorithm"):
        yield "a diffusion model computes a token several times", "no `--dllm-algorithm`"
    if environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes"):
        yield "the Rust server sends replies past the plugin", "no SGLANG_RUST_SERVER in the environment"


def _graphs(arguments: Mapping[str, Any]) -> bool:
    config = arguments.get("cuda_graph_config")
    if not isinstance(config, Mapping):
        return not arguments.get("disable_cuda_graph")
    return any(isinstance(phase, Mapping) and phase.get("backend") != "disabled" for phase in config.values())
