"""What a server must stay while a run uses it, and what it means that it did not. Pure.

A server may be restarted with more memory, other lanes' flags or another SGLang; not with other
weights or other arithmetic. What any server must be is in `suitability.py`, what each was at first
is kept by `workers/lane/first_facts.py`.
"""

from collections.abc import Iterator

from storage.errors import UnsuitableError
from workers.sglang.facts import ServerFacts
from workers.sglang.suitability import same_model

GO_ON = "or, if it shall be so from now on, run `producer enqueue` for this run again"
UNQUANTIZED = "auto"
"""A KV cache that nobody says more of: it is the one of before or it is refused as unknown."""


def check_unchanged(first: ServerFacts, now: ServerFacts, url: str) -> None:
    """Raises `UnsuitableError` naming every difference, when it is not what the run began with."""
    found = list(_differences(first, now))
    if found:
        raise UnsuitableError(
            f"{url} changed since the run began with it: {changes(first, now)}",
            code="server.changed",
            hint=f"restart it with {' '.join(how for _, how in found)}; {GO_ON}",
        )


def changes(first: ServerFacts, now: ServerFacts) -> str:
    """Every difference, in words; empty when there is none."""
    return ", ".join(what for what, _ in _differences(first, now))


def _differences(first: ServerFacts, now: ServerFacts) -> Iterator[tuple[str, str]]:
    """What differs, and the flag that makes it as it was."""
    if not same_model(first.model, now.model):
        yield _said("model", first.model, now.model), f"`--model-path {first.model}`"
    if first.architecture and now.architecture and first.architecture != now.architecture:
        yield _said("architecture", first.architecture, now.architecture), "the model of before"
    if first.weight_version != now.weight_version:
        yield (
            _said("weights", first.weight_version, now.weight_version),
            f"the weights of before (`--weight-version {first.weight_version}`)",
        )
    if first.dtype != now.dtype:
        yield _said("dtype", first.dtype, now.dtype), f"`--dtype {first.dtype}`"
    if first.quantization != now.quantization:
        flag = f"`--quantization {first.quantization}`" if first.quantization else "no `--quantization`"
        yield _said("quantization", first.quantization, now.quantization), flag
    before, after = kv_cache(first), kv_cache(now)
    if before != after and UNQUANTIZED not in (before, after):
        yield _said("KV cache", before, after), f"`--kv-cache-dtype {before}`"


def kv_cache(facts: ServerFacts) -> str:
    """The dtype of the KV cache in one spelling; `auto` where the server does not say what it became."""
    said = facts.plugin.kv_dtype if facts.plugin else facts.kv_cache_dtype
    return "bf16" if said == "bfloat16" else said


def _said(what: str, before: object, after: object) -> str:
    return f"{what} `{before}` → `{after}`"
