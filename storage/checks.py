"""Checks of samples as a segment keeps them, in its attribute `checks`; and what they come to.

One JSON object a checked sample: `id`, `digest` (hex) and the fields of `sample.Check`. A merged
segment has the lists of those it replaces, one after the other. Reading them is in `check_log.py`; how a
sample is checked is no matter of the store.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from storage.json_records import read_record
from storage.sample import Check, States

ATTRIBUTE = "checks"
MAX_TEXTS = 8
"""Most alarms of one check, and most reasons for what was skipped."""
MAX_CHARACTERS = 500
"""Longest text in a check."""
SHOWN = 20
"""Alarms a summary tells one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedAlarm:
    """An alarm and the sample it is about."""

    id: str
    """The sample's, hex."""
    server: str
    code: str
    value: float
    limit: float
    message: str

    def __str__(self) -> str:
        """The alarm in one line."""
        figures = f"{self.value:.3g}, the limit is {self.limit:.3g}"
        return f"{self.code}: {figures}; sample {self.id}, server {self.server}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksSummary:
    """What the checks of many samples come to; None: nothing to tell."""

    samples: int = 0
    """Samples that were checked."""
    compared: int = 0
    """Of these, captured a second time and compared."""
    rows: int = 0
    """Rows compared."""
    worst_error: float | None = None
    """Largest `Check.worst_error`."""
    typical_error: float | None = None
    worst_cosine: float | None = None
    with_head: int = 0
    """Samples whose log-probabilities were computed from their final states."""
    head_error: float | None = None
    """Largest `Check.head_error`."""
    least_logprob: float | None = None
    """Least `Check.mean_logprob`."""
    alarmed: int = 0
    """Samples with an alarm."""
    alarms: tuple[RaisedAlarm, ...] = ()
    """The first of them."""
    skipped: tuple[str, ...] = ()
    """Why something was not checked, each reason once."""

    def __str__(self) -> str:
        """The summary in one line, without the alarms themselves."""
        said = [f"{self.compared} samples captured again"]
        if self.worst_error is not None:
            said.append(f"worst deviation {self.worst_error:.2g}")
        if self.head_error is not None:
            said.append(f"output head within {self.head_error:.2g} nats in {self.with_head}")
        alarm = f"{self.alarmed} with an ALARM" if self.alarmed else "no alarm"
        return ", ".join(said) + f"; {alarm}"


def checks_of(batch: Iterable[States]) -> list[dict[str, Any]]:
    """The attribute of a segment of these samples."""
    return [
        {"id": states.id.hex(), "digest": states.digest.hex(), **asdict(states.check)}
        for states in batch
        if states.check is not None
    ]


def bounded(check: Check) -> Check:
    """The check with its texts cut so that `read_check` takes it: what it says names paths and servers."""
    return replace(
        check,
        server=check.server[:MAX_CHARACTERS],
        skipped=tuple(reason[:MAX_CHARACTERS] for reason in check.skipped[:MAX_TEXTS]),
        alarms=tuple(
            replace(alarm, message=alarm.message[: MAX_CHARACTERS - len(alarm.code)])
            for alarm in check.alarms[:MAX_TEXTS]
        ),
    )


def read_check(content: Any) -> Check:
    """The check in this map; keys of other versions are ignored.

    Raises `ValueError` for what is none, or too large to be one.
    """
    check = read_record(Check, content, extra="ignored")
    if bounded(check) != check:
        raise ValueError("a check of that size is none of ours")
    return check


def summarize(checks: Iterable[tuple[str, Check]]) -> ChecksSummary:
    """What these checks come to; each with its sample's id in hex."""
    every = list(checks)
    alarms = [
        RaisedAlarm(
            id=id_hex,
            server=check.server,
            code=alarm.code,
            value=alarm.value,
            limit=alarm.limit,
            message=alarm.message,
        )
        for id_hex, check in every
        for alarm in check.alarms
    ]
    reasons = dict.fromkeys(reason for _, check in every for reason in check.skipped)
    return ChecksSummary(
        samples=len(every),
        compared=sum(check.rows > 0 for _, check in every),
        rows=sum(check.rows for _, check in every),
        worst_error=max(_known(every, "worst_error"), default=None),
        typical_error=max(_known(every, "typical_error"), default=None),
        worst_cosine=min(_known(every, "worst_cosine"), default=None),
        with_head=len(_known(every, "head_error")),
        head_error=max(_known(every, "head_error"), default=None),
        least_logprob=min(_known(every, "mean_logprob"), default=None),
        alarmed=sum(bool(check.alarms) for _, check in every),
        alarms=tuple(alarms[:SHOWN]),
        skipped=tuple(reasons)[:SHOWN],
    )


def _known(checks: Sequence[tuple[str, Check]], name: str) -> list[float]:
    return [value for _, check in checks if (value := getattr(check, name)) is not None]
