"""What the page shows of this moment, as JSON, from one look at Redis. Pure; asks nobody.

The board is the feeder's word on the run, the processes speak for themselves; a board that
nobody renews is said to be old.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from storage.checks import ChecksSummary
from workers.board.board import Board, DatasetBoard, ServerBoard
from workers.board.processes import ProcessSnapshot, ServerLoad
from workers.board.tally import Tally
from workers.broker.backlog import Backlog
from workers.broker.queues import SINK
from workers.runs import Carried

ALARMS = 5
"""Alarms of checks that are shown one by one; `storage info` has all."""
STALE_S = 15.0
"""The feeder writes every second; a board older than this has nobody behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at Redis."""

    answers: bool = False
    """Whether Redis did; all else is empty when it did not."""
    carried: Carried | None = None
    board: Board | None = None
    """That of the carried run."""
    processes: tuple[ProcessSnapshot, ...] = ()
    tally: Tally | None = None
    backlog: Backlog | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts id → `ServerFacts` as JSON."""

    @property
    def loads(self) -> dict[str, ServerLoad]:
        """Address → what the server said last of its load, where it says that."""
        return {s.url: s.load for p in self.processes for s in p.servers if s.load is not None}


def snapshot(look: Look, now: float) -> dict[str, Any]:
    """All figures of the page; what is not known is null."""
    board, tally = look.board, look.tally
    state, says = _state(look, now)
    loads = look.loads
    return {
        "at": now,
        "answers": look.answers,
        "state": state,
        "says": says,
        "run": _run(look, now),
        "totals": _totals(board, tally) if board else None,
        "datasets": [_dataset(one) for one in board.datasets] if board else [],
        "dead_letters": _dead_letters(board) if board else [],
        "lanes": list(_lanes(look)),
        "servers": [_server(one, look, loads.get(one.url), now) for one in board.servers] if board else [],
        "sinks": [_sink(one, look, now) for one in look.processes if one.lane == SINK],
        "notes": list(board.notes) if board and state != "stalled" else [],
        "checks": _checks(board.checks) if board else None,
    }


def _state(look: Look, now: float) -> tuple[str, str]:
    """The state in one word and what a person should know of it, a sentence."""
    if not look.answers:
        return (
            "away",
            "Redis does not answer. It is asked again each second; the run itself goes on by the store.",
        )
    if look.carried is None:
        return "none", "There is no run yet: `producer enqueue` begins one."
    board = look.board
    if board is None:
        return (
            "waiting",
            "The run has begun; no feeder has looked at it yet. A sink feeds: `producer up` starts one.",
        )
    if board.finished:
        return "finished", "Every wanted prompt has its outcome."
    if now - board.at > STALE_S:
        return (
            "stalled",
            "No sink is up: nothing is fed or stored, and these figures are old. `producer up` starts one.",
        )
    if not any(process.lane != SINK for process in look.processes):
        return "idle", "No lane worker is up: nothing is generated. `producer up` starts them."
    return "running", ""


def _run(look: Look, now: float) -> dict[str, Any] | None:
    if look.carried is None:
        return None
    run, board = look.carried.run, look.board
    return {
        "id": run.id,
        "model": PurePath(run.spec.model).name,
        "output_dir": look.carried.output_dir,
        "folder": PurePath(look.carried.output_dir).name,
        "states": str(board.states if board else run.spec.states),
        "finished": look.carried.finished,
        "age_s": now - board.at if board else None,
        "holder": board.holder if board else None,
    }


def _totals(board: Board, tally: Tally | None) -> dict[str, Any]:
    datasets, rates = board.datasets, board.rates
    generated = sum(one.generated for one in datasets)
    truncated = sum(one.truncated for one in datasets)
    over = board.finished
    return {
        "done": board.done,
        "wanted": board.wanted,
        "reading": any(one.reading for one in datasets),
        "generated": generated,
        "stored": sum(one.stored for one in datasets),
        "failed": sum(one.failed for one in datasets),
        "tokens": sum(one.tokens for one in datasets),
        "truncated": truncated,
        "truncated_share": truncated / generated if generated else None,
        "output_per_s": rates.generated_tokens_per_s if rates and not over else None,
        "samples_per_s": rates.samples_per_s if rates and not over else None,
        "over_s": rates.over_s if rates else None,
        "left_s": board.left_s,
        "wasted": board.wasted,
        "wasted_tokens": board.wasted_tokens,
        "republished": board.republished,
        "sink_waiting": board.sink_waiting,
        "spool_bytes": board.spool_bytes,
        "stored_bytes": board.stored_bytes,
        "disk_free_bytes": board.disk_free_bytes,
        "output_tokens": tally.output_tokens if tally else 0,
        "prompt_tokens": tally.prompt_tokens if tally else 0,
        "captured_tokens": tally.captured_tokens if tally else 0,
        "again": tally.of("again") if tally else 0,
        "requeued": tally.of("requeued") if tally else 0,
    }


def _checks(checks: ChecksSummary | None) -> dict[str, Any] | None:
    """What checking some samples came to, with its first alarms as sentences."""
    if checks is None:
        return None
    return {
        "samples": checks.samples,
        "alarmed": checks.alarmed,
        "says": str(checks),
        "alarms": [str(alarm) for alarm in checks.alarms[:ALARMS]],
    }


def _dataset(one: DatasetBoard) -> dict[str, Any]:
    return asdict(one) | {
        "share": one.share,
        "truncated_share": one.truncated / one.generated if one.generated else None,
    }


def _dead_letters(board: Board) -> list[dict[str, Any]]:
    codes: dict[str, dict[str, int]] = {}
    for dataset in board.datasets:
        for code, count in dataset.dead_letters.items():
            codes.setdefault(code, {})[dataset.name] = count
    rows = [
        {"code": code, "count": sum(counts.values()), "datasets": counts} for code, counts in codes.items()
    ]
    return sorted(rows, key=lambda row: (-int(str(row["count"])), str(row["code"])))


def _lanes(look: Look) -> Iterator[dict[str, Any]]:
    """Each lane, with what it has in flight at each of its servers against its limit there."""
    for lane in look.board.lanes if look.board else ():
        waiting = look.backlog.waiting.get(lane.name, 0) if look.backlog else lane.waiting
        serving = [process for process in look.processes if process.lane == lane.name]
        urls = dict.fromkeys(server.url for process in serving for server in process.servers)
        yield asdict(lane) | {
            "waiting": waiting,
            "servers": [
                {
                    "url": url,
                    "limit": lane.limit_per_server,
                    "in_flight": sum(s.in_flight for p in serving for s in p.servers if s.url == url),
                }
                for url in urls
            ],
        }


def _server(one: ServerBoard, look: Look, load: ServerLoad | None, now: float) -> dict[str, Any]:
    ids = [s.facts_id for p in look.processes for s in p.servers if s.url == one.url and s.facts_id]
    return {
        "url": one.url,
        "state": str(one.state),
        "reason": one.reason,
        "since_s": now - one.since if one.since is not None else None,
        "lanes": list(one.lanes),
        "in_flight": one.in_flight,
        "kv_used": load.kv_used if load else None,
        "running": load.running if load else None,
        "queued": load.queued if load else None,
        "retractions": look.tally.retractions.get(one.url, 0) if look.tally else 0,
        "facts": facts_in_words(look.facts.get(ids[0])) if ids else [],
    }


def _sink(one: ProcessSnapshot, look: Look, now: float) -> dict[str, Any]:
    in_queue = look.backlog.nodes.get(one.node, 0) if look.backlog else 0
    return {
        "name": one.name,
        "node": one.node,
        "state": one.state,
        "says": one.says,
        "waiting": one.in_flight + in_queue,
        "spool_bytes": one.spool_bytes,
        "spool_max_bytes": one.spool_max_bytes,
        "spool_oldest_s": now - one.spool_oldest if one.spool_oldest is not None else None,
        "disk_free_bytes": one.disk_free_bytes,
    }


def facts_in_words(facts: Any) -> list[tuple[str, str]]:
    """A server's facts that matter to this work, each a name and a value; empty for none."""
    if not isinstance(facts, Mapping):
        return []
    plugin = facts.get("plugin") if isinstance(facts.get("plugin"), Mapping) else {}
    states = {"plugin": "by the plugin", "json": "in JSON", "off": "none"}
    words = [
        ("model", PurePath(str(facts.get("model", ""))).name),
        ("SGLang", facts.get("sglang")),
        ("weights", facts.get("quantization") or facts.get("dtype")),
        ("KV cache", (plugin or {}).get("kv_dtype") or facts.get("kv_cache_dtype")),
        ("KV room", _tokens(facts.get("max_total_tokens"))),
        ("context", _tokens(facts.get("context_length"))),
        ("batch", facts.get("max_running_requests")),
        ("states", states.get(str(facts.get("states")))),
        ("ranks", _ranks(facts)),
        ("prefill chunks", _tokens(facts.get("chunked_prefill_size")) or "whole"),
        ("prefix cache", "on" if facts.get("radix_cache") else "off"),
        ("speculative", facts.get("speculative_algorithm")),
    ]
    return [(name, str(value)) for name, value in words if value]


def _tokens(value: Any) -> str | None:
    return f"{value:,}".replace(",", "\u202f") + " tok" if isinstance(value, int) else None


def _ranks(facts: Mapping[str, Any]) -> str:
    sizes = {name: facts.get(f"{name}_size") for name in ("tp", "dp", "pp", "cp")}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if isinstance(size, int) and size > 1)
