"""What a server says of itself, as a whitelist: model, limits, what states it can give.

`/server_info` holds the server's API keys in clear, so nothing but the fields below leaves this
file. Whether a server can be used for a run is in `suitability.py`.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from storage.errors import UnsuitableError
from storage.json_records import parse_json, read_record
from storage.run import fingerprint
from workers.sglang.reply import printable

MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)
"""What reading a body raises that is not an SGLang server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFacts:
    """What the Eyas plugin inside a server adds."""

    version: int
    """Of the agreement between plugin and client."""
    node: str
    """Whose spool it writes to."""
    hs_indices: Mapping[str, tuple[int, ...]]
    """Capture → Hugging Face `hidden_states` indices the loaded model gives for it."""
    hidden_size: int
    """H."""
    num_layers: int
    """n: blocks of the model; `n` is the final state's index."""
    norm: str
    """`post` when the final state has passed the final norm, else `pre`."""
    kv_dtype: str
    """What the KV cache really is: `bfloat16`, `fp8_e4m3`, …"""
    vocab_size: int
    """Rows of the embedding that are tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server as it was when asked; what is not said is None."""

    model: str
    """Hub id or path it was started with."""
    served_name: str
    """The name it answers under; often the same."""
    tokenizer: str
    architecture: str | None
    """`LlamaForCausalLM` and such."""
    sglang: str
    """Its version."""
    weight_version: str
    """Changes when weights are swapped under a running server."""
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    """As it was started; `auto` may have become anything: see `plugin.kv_dtype`."""
    context_length: int | None
    """Most tokens of prompt and response together."""
    max_input_tokens: int | None
    """A request's ids must be fewer than this."""
    max_total_tokens: int | None
    """Room of the KV cache, tokens."""
    max_running_requests: int | None
    chunked_prefill_size: int | None
    """Tokens of a prefill chunk; None when prefills are whole."""
    radix_cache: bool
    """Whether prompts share a prefix cache."""
    speculative_algorithm: str | None
    aux_states: bool
    """Whether states are those of auxiliary layers instead of the final one."""
    aux_layer_ids: tuple[int, ...] | None
    """Ids given for them, in SGLang's own dialect; None for its default."""
    states: Literal["plugin", "json", "off"]
    """How hidden states can be had."""
    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int
    """Ranks that share a sequence's attention; `dcp_size`: when decoding."""
    dcp_size: int = 1
    overlap_schedule: bool
    cuda_graph: bool
    plugin: PluginFacts | None
    """None on a stock server."""
    embedded: bool = False
    """Whether it is no SGLang but Eyas's embedded engine, which gives states as the plugin does."""

    @property
    def facts_id(self) -> str:
        """32 hex digits over every field: equal for servers that are alike."""
        return fingerprint(self.to_json())

    @property
    def vocab_size(self) -> int | None:
        """Ids must be below this; None when a stock server does not say."""
        return self.plugin.vocab_size if self.plugin else None

    def to_json(self) -> dict[str, Any]:
        """As `facts/<facts_id>.json` and Redis hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ServerFacts":
        """The inverse of `to_json`, also of another version's; raises `ValueError`."""
        return read_record(cls, content, extra="ignored")

    def says(self) -> str:
        """What it is and how it gives states, for people."""
        through = "through the spool" if self.embedded else "by the plugin, through the spool"
        how = {"plugin": through, "json": "as JSON", "off": "none"}[self.states]
        what = "Eyas's embedded engine" if self.embedded else f"SGLang {self.sglang}"
        return f"{what}, states: {how}"


def read_facts(
    server_info: Mapping[str, Any], model_info: Mapping[str, Any], models: Mapping[str, Any]
) -> ServerFacts:
    """The facts in the bodies of `/server_info`, `/model_info` and `/v1/models`.

    The last may be empty. Raises `UnsuitableError` when these are not an SGLang server's.
    """
    try:
        facts = _read(server_info, model_info, models)
        # As it will be stored: numbers that can be counted with, and text that UTF-8 can say.
        return ServerFacts.from_json(parse_json(printable(json.dumps(facts.to_json(), ensure_ascii=False))))
    except MALFORMED as error:
        raise UnsuitableError(
            printable(f"its `/server_info` is not an SGLang server's: {error!r}"[:300]),
            code="server.not_sglang",
            hint="give the address of an SGLang server with `--server-url`",
        ) from None


def _read(info: Mapping[str, Any], model: Mapping[str, Any], models: Mapping[str, Any]) -> ServerFacts:
    plugin = _plugin(info["eyas"]) if info.get("eyas") else None
    context = info.get("context_length")
    if context is None and models.get("data"):
        context = models["data"][0].get("max_model_len")
    architectures = model.get("architectures")
    ids = info.get("return_aux_hidden_state_layer_ids")
    aux = bool(info.get("enable_return_aux_hidden_states"))
    # The EAGLE3 flag that turns auxiliary states on loads no draft and speculates nothing.
    speculative = info.get("speculative_algorithm")
    if aux and speculative == "EAGLE3" and not info.get("speculative_draft_model_path"):
        speculative = None
    return ServerFacts(
        model=str(info["model_path"]),
        served_name=str(
            model.get("served_model_name") or info.get("served_model_name") or info["model_path"]
        ),
        tokenizer=str(info.get("tokenizer_path") or info["model_path"]),
        architecture=str(architectures[0]) if architectures else None,
        sglang=str(info.get("version") or "unknown"),
        weight_version=str(model.get("weight_version") or info.get("weight_version") or "default"),
        dtype=str(info.get("dtype") or "auto"),
        quantization=_text(info.get("quantization")),
        kv_cache_dtype=str(info.get("kv_cache_dtype") or "auto"),
        context_length=_count(context),
        max_input_tokens=_count(info.get("max_req_input_len")),
        max_total_tokens=_count(info.get("max_total_num_tokens")),
        max_running_requests=_count(info.get("max_running_requests")),
        chunked_prefill_size=_count(info.get("chunked_prefill_size")),
        radix_cache=not info.get("disable_radix_cache", False),
        speculative_algorithm=_text(speculative),
        aux_states=aux,
        aux_layer_ids=None if ids is None else tuple(int(i) for i in ids),
        states="plugin" if plugin else "json" if _whole_states(info) else "off",
        tp_size=int(info.get("tp_size") or 1),
        dp_size=int(info.get("dp_size") or 1),
        pp_size=int(info.get("pp_size") or 1),
        cp_size=int(info.get("attn_cp_size") or 1),
        dcp_size=int(info.get("dcp_size") or 1),
        overlap_schedule=not info.get("disable_overlap_schedule", False),
        cuda_graph=not info.get("disable_cuda_graph", False),
        plugin=plugin,
        embedded=bool(info.get("eyas_engine")),
    )


def _plugin(content: Mapping[str, Any]) -> PluginFacts:
    return PluginFacts(
        version=int(content["plugin"]),
        node=str(content["node"]),
        hs_indices={str(k): tuple(int(i) for i in v) for k, v in content["hs_indices"].items()},
        hidden_size=int(content["hidden_size"]),
        num_layers=int(content["num_layers"]),
        norm=str(content["norm"]),
        kv_dtype=str(content["kv_dtype"]),
        vocab_size=int(content["vocab_size"]),
    )


def _whole_states(info: Mapping[str, Any]) -> bool:
    """Whether every token's states can be had; mode `last` gives one row."""
    mode = info.get("return_hidden_states_mode")
    return bool(info.get("enable_return_hidden_states")) if mode is None else mode == "full"


def _text(value: Any) -> str | None:
    return str(value) if value else None


def _count(value: Any) -> int | None:
    """SGLang writes "no limit" as null, 0 or -1."""
    return int(value) if value is not None and int(value) > 0 else None


def fetch_facts(url: str, api_key: str | None = None) -> ServerFacts:
    """The facts of the server at `url`, for programs without a loop.

    Raises `ServerAwayError` (an `UnavailableError`) when nothing answers and `UnsuitableError`
    when what answers cannot be used: another kind of server, or a key it does not take.
    """
    from workers.sglang.client import (
        SGLangClient,  # httpx costs 0.2 s that a command's first words do not have
    )

    async def fetch() -> ServerFacts:
        async with SGLangClient(api_key) as client:
            return await client.facts(url)

    return asyncio.run(fetch())
