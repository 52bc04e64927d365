"""What a run's spec and settings become: what is said now over what its folder holds.

Flags that nobody gave leave a run as it is; caps alone are always those of this command. Only the
choosing is here; `target.py` makes the spec and `enqueue.py` writes both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from producer.captures import check_capture
from producer.checkpoint import read_checkpoint
from producer.target import Asked, Target
from storage.run import StatesMode
from storage.settings import RunSettings, read_settings
from workers.broker.queues import Lane


def settings_before(output: Path) -> RunSettings | None:
    """The folder's settings; None when the run was killed before it had any."""
    try:
        return read_settings(output)
    except FileNotFoundError:
        return None


def asked_of(flags: Mapping[str, Any], said: Mapping[str, Any]) -> Asked:
    """What is asked of the model and its run. Raises `UsageError` for an unknown capture."""
    check_capture(flags["capture"])
    names = (
        "model",
        "capture",
        "short_max_tokens",
        "long_max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
    )
    return Asked(
        **{name: said.get(name) for name in names},
        states=StatesMode(said["states"]) if "states" in said else None,
        trust_remote_code=flags["trust_remote_code"],
    )


def settings_after(
    flags: Mapping[str, Any],
    said: Mapping[str, Any],
    before: RunSettings | None,
    target: Target,
    urls: tuple[str, ...],
    capture_urls: tuple[str, ...],
) -> RunSettings:
    """The settings as they shall be, with the datasets of before."""
    kept = before.concurrency if before else {}
    limits = {
        lane.value: said.get(f"{lane}_concurrency") or kept.get(lane) or flags[f"{lane}_concurrency"]
        for lane in Lane
    }
    return RunSettings(
        server_urls=urls,
        capture_urls=capture_urls,
        concurrency=limits,
        max_input_tokens=target.max_input_tokens,
        states=target.spec.states,
        capture=target.spec.capture,
        allow_quantized_kv=bool(
            said.get("allow_quantized_kv", before.allow_quantized_kv if before else False)
        ),
        checkpoint=read_checkpoint(target.folder),
        check_every=said.get("check_every", before.check_every if before else flags["check_every"]),
        datasets=before.datasets if before else {},
        retries=before.retries if before else (),
    )
