"""What `producer plan` found, as text for a person and as JSON.

Pure: counts in, text out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.words import count, size
from storage.run import CaptureSpec

STATE_BYTES = 2
"""bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPlan:
    """One dataset's counts."""

    name: str
    form: str
    column: str
    tokens: NDArray[np.int32]
    """Of each prompt."""
    lanes: Mapping[str, int]
    """Lane → prompts."""
    dropped: Mapping[str, int]
    """Reason → rows."""
    whole: bool
    """Whether the source was read to its end, not only to a cap."""

    @property
    def total_tokens(self) -> int:
        """Of all prompts."""
        return int(self.tokens.sum(dtype=np.int64))

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "name": self.name,
            "form": self.form,
            "column": self.column,
            "prompts": int(self.tokens.size),
            "prompt_tokens": {"total": self.total_tokens, **spread(self.tokens)},
            "lanes": dict(self.lanes),
            "dropped": dict(self.dropped),
            "read_to_end": self.whole,
        }


def spread(tokens: NDArray[np.int32]) -> dict[str, int]:
    """Mean, 95th percentile and maximum, in whole tokens; zeros of nothing."""
    if not tokens.size:
        return {"mean": 0, "p95": 0, "max": 0}
    p95 = np.percentile(tokens, 95, method="higher")
    return {"mean": round(float(tokens.mean())), "p95": int(p95), "max": int(tokens.max())}


def token_bytes(capture: CaptureSpec) -> int:
    """Bytes of one token's states: L · H · 2."""
    return len(capture.hs_indices) * capture.hidden_size * STATE_BYTES


def _state_tokens(plans: Sequence[DatasetPlan], response_tokens: int | None) -> int:
    generated = sum(plan.tokens.size for plan in plans if plan.form != "input_ids")
    return sum(plan.total_tokens for plan in plans) + generated * (response_tokens or 0)


def as_json(
    plans: Sequence[DatasetPlan],
    captures: Sequence[CaptureSpec],
    response_tokens: int | None,
) -> dict[str, Any]:
    """The plan as `--json` prints it, without where it comes from."""
    tokens = _state_tokens(plans, response_tokens)
    return {
        "datasets": [plan.to_json() for plan in plans],
        "prompts": sum(int(plan.tokens.size) for plan in plans),
        "prompt_tokens": sum(plan.total_tokens for plan in plans),
        "response_tokens_each": response_tokens,
        "states": [
            {
                "capture": capture.name,
                "hs_indices": list(capture.hs_indices),
                "bytes_per_token": token_bytes(capture),
                "bytes": token_bytes(capture) * tokens,
            }
            for capture in captures
        ],
    }


def as_text(
    plans: Sequence[DatasetPlan], captures: Sequence[CaptureSpec], response_tokens: int | None
) -> str:
    """The plan as a person reads it."""
    head = ("dataset", "form", "lanes", "prompts", "tokens", "mean", "p95", "max", "dropped")
    rows: list[tuple[str, ...]] = [head]
    for plan in plans:
        lanes = ", ".join(f"{lane} {count(rows)}" for lane, rows in plan.lanes.items()) or "-"
        numbers = (
            plan.tokens.size,
            plan.total_tokens,
            *spread(plan.tokens).values(),
            sum(plan.dropped.values()),
        )
        rows.append((plan.name, plan.form, lanes, *(count(number) for number in numbers)))
    every = np.concatenate([plan.tokens for plan in plans])
    numbers = (every.size, int(every.sum(dtype=np.int64)), *spread(every).values())
    dropped = sum(sum(plan.dropped.values()) for plan in plans)
    rows.append(("all", "", "", *(count(number) for number in (*numbers, dropped))))
    lines = _columns(rows, left=3)
    for plan in plans:
        if plan.dropped:
            reasons = ", ".join(f"{reason} {count(rows)}" for reason, rows in sorted(plan.dropped.items()))
            lines += ["", f"{plan.name} drops {reasons}"]
    if captures:
        tokens = _state_tokens(plans, response_tokens)
        what = (
            f"prompts and {count(response_tokens)} tokens a response"
            if response_tokens
            else "the prompts alone"
        )
        states = [("states", "a token", what)]
        states += [(c.name, size(token_bytes(c)), size(token_bytes(c) * tokens)) for c in captures]
        lines += ["", *_columns(states, left=1)]
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """The rows as lines, the first `left` columns flush left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
