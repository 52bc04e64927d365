"""Whether a server can be used for a run: one error naming the flag to change, or silence.

Pure: facts in, verdict out. Asked by `enqueue` before anything is stored and by every lane at
each (re)connect. It does not ask the server (`client.py`) or decide what is captured (the producer does).
"""

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from storage.errors import UnsuitableError
from storage.run import CaptureSpec, RunSpec, Sampling, StatesMode
from storage.settings import RunSettings
from workers.sglang.facts import ServerFacts

PLUGIN_VERSION = 1
"""The agreement between plugin and client that this client speaks."""
INDEX_DIALECT = frozenset(
    {"DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Glm4MoeLiteForCausalLM"}
)
"""Architectures whose explicit layer ids SGLang takes as indices unless the first is 1."""
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
    )


def check_suitable(facts: ServerFacts, needs: Needs, url: str = "the server") -> None:
    """Raises `UnsuitableError` for the first reason why this server cannot be used."""
    _check_model(facts, needs, url)
    _check_limits(facts, needs, url)
    _check_kv(facts, needs, url)
    if needs.capture is not None:
        _check_states(facts, needs.capture, url)
        _check_prefill(facts, needs, url)
        _check_ranks(facts, needs.capture, url)


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
    kv = facts.plugin.kv_dtype if facts.plugin else facts.kv_cache_dtype
    if re.search(r"fp8|float8|fp4|float4|int8|int4", kv.lower()):
        raise UnsuitableError(
            f"{url} keeps its KV cache in `{kv}`, which degrades responses and states",
            code="server.quantized_kv",
            hint="start it with `--kv-cache-dtype bfloat16`, or enqueue with `--allow-quantized-kv`",
        )
    if kv == "auto" and facts.quantization:
        raise UnsuitableError(
            f"{url} runs a `{facts.quantization}` checkpoint with KV cache `auto`, which may have become fp8",
            code="server.unknown_kv",
            hint="start it with `--kv-cache-dtype bfloat16`, or enqueue with `--allow-quantized-kv`",
        )


def _check_states(facts: ServerFacts, capture: CaptureSpec, url: str) -> None:
    if facts.states == "off":
        raise UnsuitableError(
            f"{url} gives no hidden states",
            code="server.no_states",
            hint="start it with `--enable-return-hidden-states`, or " + INSTALL_PLUGIN,
        )
    if facts.plugin is not None:
        plugin = facts.plugin
        if plugin.version != PLUGIN_VERSION:
            raise UnsuitableError(
                f"{url} has version `{plugin.version}` of the plugin, this is version `{PLUGIN_VERSION}`",
                code="server.plugin_version",
                hint="install the same eyas on both sides: " + INSTALL_PLUGIN,
            )
        given = {i for indices in plugin.hs_indices.values() for i in indices}
        if not set(capture.hs_indices) <= given or plugin.hidden_size != capture.hidden_size:
            raise UnsuitableError(
                f"{url} gives hidden states {sorted(given)} of size `{plugin.hidden_size}`; `{capture.name}` "
                f"is {list(capture.hs_indices)} of size `{capture.hidden_size}`",
                code="server.other_layers",
                hint="choose another `--capture`, or start the server with the layers the run wants",
            )
        return
    final = capture.norm != "none"
    if final and len(capture.hs_indices) > 1:
        raise UnsuitableError(
            f"{url} is a stock SGLang: it gives auxiliary layers or the final state, not `{capture.name}`",
            code="server.not_both",
            hint=f"{INSTALL_PLUGIN}; or enqueue with `--capture aux` or `--capture final`",
        )
    if final and facts.aux_states:
        raise UnsuitableError(
            f"{url} gives auxiliary layers in place of the final state",
            code="server.other_layers",
            hint="start it without `--enable-return-aux-hidden-states`, or enqueue with `--capture aux`",
        )
    layers = stock_layers(facts)
    if not final and facts.aux_states and layers not in (None, capture.hs_indices):
        raise UnsuitableError(
            f"{url} gives the layers {list(layers or ())}, `{capture.name}` is {list(capture.hs_indices)}",
            code="server.other_layers",
            hint="start it with other `--return-aux-hidden-state-layer-ids`, or choose another `--capture`",
        )
    if not final and not facts.aux_states:
        raise UnsuitableError(
            f"{url} gives the final state, not auxiliary layers",
            code="server.other_layers",
            hint="start it with `--enable-return-aux-hidden-states --speculative-algorithm EAGLE3`, or "
            "enqueue with `--capture final`",
        )


def stock_layers(facts: ServerFacts) -> tuple[int, ...] | None:
    """The hidden-state indices a stock server was told to give; None when it was left to its default.

    Its ids are the blocks whose output is given, one below the index, but some models take them
    as indices unless the first is 1.
    """
    ids = facts.aux_layer_ids
    if ids is None:
        return None
    as_they_are = facts.architecture in INDEX_DIALECT and ids[0] != 1
    return ids if as_they_are else tuple(i + 1 for i in ids)


def _check_prefill(facts: ServerFacts, needs: Needs, url: str) -> None:
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


def _check_ranks(facts: ServerFacts, capture: CaptureSpec, url: str) -> None:
    auxiliary = len(capture.hs_indices) > 1 or capture.norm == "none"
    for flag, size in (("--pp-size", facts.pp_size), ("--attn-cp-size", facts.cp_size)):
        if size > 1 and auxiliary:
            raise UnsuitableError(
                f"{url} runs with `{flag} {size}`: no one process there sees all layers",
                code="server.parallel",
                hint=f"start it with `{flag} 1`",
            )
