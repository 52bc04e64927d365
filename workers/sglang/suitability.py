"""Whether a server can be used for a run: one error naming the flag to change, or silence.

Pure: facts in, verdict out. Asked by `enqueue` before anything is stored and by every lane at
each (re)connect. It does not ask the server (`client.py`) or decide what is captured (the producer does).
"""

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from storage.errors import UnsuitableError
from storage.run import CaptureSpec, RunSpec, Sampling, StatesMode
from storage.settings import Checkpoint, RunSettings
from workers.sglang.facts import PluginFacts, ServerFacts
from workers.sglang.layer_ids import AUXILIARY, default_layers, layers_of, said_ids

PLUGIN_VERSION = 1
"""The agreement between plugin and client that this client speaks."""
QUANTIZED_KV = re.compile(r"fp8|float8|fp4|float4|int8|int4")
"""In the name of a dtype: fp8_e4m3, mxfp8, nvfp4, fp4_mx_block16 and what may follow."""
BF16_KV = "start it with `--kv-cache-dtype bf16`"
INSTALL_PLUGIN = "run `pip install --no-deps eyas` in SGLang's environment and restart it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What is asked of one server."""

    model: str
    """Hub id or path."""
    vocab_size: int
    """Ids that will be sent lie below this."""
    input_tokens: int
    """A request's ids may number as many as this, less one."""
    capture: CaptureSpec | None
    """The states it must give; None when it only generates."""
    sampling: Sampling = field(default_factory=Sampling)
    """How it is asked to pick tokens: tried with the first token, so that what it refuses is a
    server's state and not ten thousand dead letters."""
    allow_quantized_kv: bool = False
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """What the model's files say where servers say nothing."""


def needs_of(spec: RunSpec, settings: RunSettings, *, captures: bool) -> Needs:
    """What the run asks of a server that generates, or, with `captures`, of one that captures.

    In mode `inline` a generating server gives the states too.
    """
    inline = settings.states is StatesMode.INLINE
    return Needs(
        model=spec.model,
        vocab_size=spec.vocab_size,
        input_tokens=settings.max_input_tokens,
        capture=settings.capture if captures or inline else None,
        sampling=spec.sampling,
        allow_quantized_kv=settings.allow_quantized_kv,
        checkpoint=settings.checkpoint,
    )


def check_suitable(facts: ServerFacts, needs: Needs, url: str = "the server") -> None:
    """Raises `UnsuitableError` for the first reason why this server cannot be used."""
    _check_model(facts, needs, url)
    _check_limits(facts, needs, url)
    _check_kv(facts, needs, url)
    if needs.capture is not None:
        _check_states(facts, needs.capture, needs.checkpoint.num_layers, url)
        _check_prefill(facts, url)
        _check_ranks(facts, url)


def same_model(one: str, other: str) -> bool:
    """Whether two names can mean the same model.

    Hub ids are compared whole; a path counts by its last part, a snapshot of the hub's cache by
    the id it was downloaded under. Mounts differ between machines, so more cannot be told.
    """
    a, b = _hub_id(one), _hub_id(other)
    if a and b:
        return a.lower() == b.lower()
    return _last_part(a or one).lower() == _last_part(b or other).lower()


def _hub_id(name: str) -> str | None:
    """`org/name`, for a hub id or a snapshot folder in the hub's cache; else None."""
    snapshot = re.search(r"(?:^|/)models--([^/]+?)--([^/]+)(?:/|$)", name)
    if snapshot:
        return f"{snapshot[1]}/{snapshot[2]}"
    return name if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) else None


def _last_part(name: str) -> str:
    return PurePosixPath(name.rstrip("/") or name).name or name


def _check_model(facts: ServerFacts, needs: Needs, url: str) -> None:
    if not (same_model(facts.model, needs.model) or same_model(facts.served_name, needs.model)):
        raise UnsuitableError(
            f"{url} serves `{facts.model}`, the run is for `{needs.model}`",
            code="server.other_model",
            hint=f"start it with `--model-path {needs.model}`, or enqueue with `--model {facts.model}`",
        )
    if facts.vocab_size is not None and facts.vocab_size < needs.vocab_size:
        raise UnsuitableError(
            f"{url} knows `{facts.vocab_size}` token ids, the tokenizer makes `{needs.vocab_size}`",
            code="server.vocabulary",
            hint="give the tokenizer of the served model with `--model`; an id outside kills the server",
        )


def _check_limits(facts: ServerFacts, needs: Needs, url: str) -> None:
    if facts.max_input_tokens is not None and facts.max_input_tokens < needs.input_tokens:
        raise UnsuitableError(
            f"{url} takes fewer than `{facts.max_input_tokens}` tokens, the run sends up to "
            f"`{needs.input_tokens - 1}`",
            code="server.context",
            hint=f"start it with `--context-length {needs.input_tokens + 6}` or more",
        )


def _check_kv(facts: ServerFacts, needs: Needs, url: str) -> None:
    if needs.allow_quantized_kv:
        return
    said = facts.plugin.kv_dtype if facts.plugin else facts.kv_cache_dtype
    became = _auto_kv(facts, needs.checkpoint) if said == "auto" else said
    if became is None:
        raise UnsuitableError(
            f"{url} keeps its KV cache in `auto`, which may be fp8: neither a plugin nor the checkpoint's "
            "`config.json` says what it became",
            code="server.unknown_kv",
            hint=f"{BF16_KV}, or enqueue with `--allow-quantized-kv`",
        )
    if QUANTIZED_KV.search(became.lower()):
        through = "`auto`, which this checkpoint makes " if said == "auto" else ""
        raise UnsuitableError(
            f"{url} keeps its KV cache in {through}`{became}`: it degrades responses and states",
            code="server.quantized_kv",
            hint=f"{BF16_KV}, or enqueue with `--allow-quantized-kv`",
        )


def _auto_kv(facts: ServerFacts, checkpoint: Checkpoint) -> str | None:
    """What a stock server's `auto` became, as far as the checkpoint decides that."""
    # A server that quantizes what the checkpoint does not may quantize its cache with it.
    surprising = facts.quantization is not None and checkpoint.quantization is None
    return None if surprising else checkpoint.auto_kv


def _check_states(facts: ServerFacts, capture: CaptureSpec, num_layers: int | None, url: str) -> None:
    aux = capture.hs_indices if capture.norm == "none" else capture.hs_indices[:-1]
    named = facts.aux_layer_ids is not None
    flags = said_ids(aux, facts.architecture, num_layers, explicit=named) if aux else None
    if facts.states == "off":
        more = f"`, or {INSTALL_PLUGIN}" if not aux else f" {flags}`" if flags else "`"
        raise UnsuitableError(
            f"{url} gives no hidden states",
            code="server.no_states",
            hint=f"start it with `--enable-return-hidden-states --chunked-prefill-size -1{more}",
        )
    if facts.plugin is not None:
        _check_plugin(facts.plugin, capture, flags, url)
        return
    if aux and capture.norm != "none":
        raise UnsuitableError(
            f"{url} is a stock SGLang: it gives auxiliary layers or the final state, not both, which "
            f"`--capture {capture.name}` asks for",
            code="server.not_both",
            hint=f"{INSTALL_PLUGIN}; or enqueue with `--capture final`, or with `--capture aux` once it is "
            f"started with `{AUXILIARY}`",
        )
    if not aux and facts.aux_states:
        raise UnsuitableError(
            f"{url} gives auxiliary layers in place of the final state",
            code="server.other_layers",
            hint="start it without `--enable-return-aux-hidden-states`, or enqueue with `--capture aux`",
        )
    start = (
        f"start it with `{flags}`" if flags else "no SGLang gives these layers: choose another `--capture`"
    )
    if aux and not facts.aux_states:
        raise UnsuitableError(
            f"{url} gives the final state, not auxiliary layers",
            code="server.other_layers",
            hint=f"{start}, or enqueue with `--capture final`",
        )
    layers = stock_layers(facts, num_layers)
    if aux and layers != aux:
        given = "layers that nobody names" if layers is None else f"the layers {list(layers)}"
        raise UnsuitableError(
            f"{url} gives {given}, `{capture.name}` is {list(aux)}",
            code="server.other_layers",
            hint=f"{start}, or enqueue with another `--capture`",
        )


def _check_plugin(plugin: PluginFacts, capture: CaptureSpec, flags: str | None, url: str) -> None:
    if plugin.version != PLUGIN_VERSION:
        raise UnsuitableError(
            f"{url} has version `{plugin.version}` of the plugin, this is version `{PLUGIN_VERSION}`",
            code="server.plugin_version",
            hint="install the same eyas on both sides: " + INSTALL_PLUGIN,
        )
    given = {i for indices in plugin.hs_indices.values() for i in indices}
    if not set(capture.hs_indices) <= given or plugin.hidden_size != capture.hidden_size:
        start = f"start it with `{flags}`, or " if flags else ""
        raise UnsuitableError(
            f"{url} gives hidden states {sorted(given)} of size `{plugin.hidden_size}`; `{capture.name}` "
            f"is {list(capture.hs_indices)} of size `{capture.hidden_size}`",
            code="server.other_layers",
            hint=f"{start}enqueue with another `--capture`",
        )
    if capture.norm not in ("none", plugin.norm):
        raise UnsuitableError(
            f"{url} gives the final state with norm `{plugin.norm}`, the run's is `{capture.norm}`",
            code="server.other_layers",
            hint="install the same eyas on both sides: " + INSTALL_PLUGIN,
        )


def stock_layers(facts: ServerFacts, num_layers: int | None) -> tuple[int, ...] | None:
    """The hidden-state indices a stock server gives; None when it was left to its default and nobody
    says how many blocks the model has.
    """
    if facts.aux_layer_ids is not None:
        return layers_of(facts.aux_layer_ids, facts.architecture, num_layers)
    return None if num_layers is None else default_layers(facts.architecture, num_layers)


def _check_prefill(facts: ServerFacts, url: str) -> None:
    if facts.speculative_algorithm is not None:
        raise UnsuitableError(
            f"{url} decodes speculatively (`{facts.speculative_algorithm}`), which is not for capture",
            code="server.speculative",
            hint="start it without `--speculative-algorithm`, or capture elsewhere: `--capture-server-url`",
        )
    # The plugin gathers every chunk; a stock server returns the last one only, and says nothing.
    # A chunk at least as long as any request still splits what shares a batch with others.
    if facts.plugin is None and facts.chunked_prefill_size is not None:
        raise UnsuitableError(
            f"{url} prefills in chunks of `{facts.chunked_prefill_size}`, which loses rows of hidden states",
            code="server.chunked",
            hint="start it with `--chunked-prefill-size -1`, or " + INSTALL_PLUGIN,
        )


def _check_ranks(facts: ServerFacts, url: str) -> None:
    for flag, size, what in (
        ("--pp-size", facts.pp_size, "layers"),
        ("--attn-cp-size", facts.cp_size, "rows"),
        ("--dcp-size", facts.dcp_size, "rows"),
    ):
        if size > 1:
            raise UnsuitableError(
                f"{url} runs with `{flag} {size}`: no one process there sees all {what}",
                code="server.parallel",
                hint=f"start it with `{flag} 1`, or capture elsewhere: `--capture-server-url`",
            )
