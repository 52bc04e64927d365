"""Which queues, task names and kinds of process there are.

A process serves one lane or the sink, and `-Q` says which. Nothing here talks to Redis.
"""

from collections.abc import Sequence
from enum import StrEnum

from storage.errors import UsageError


class Lane(StrEnum):
    """A queue of orders with its own limit, token limit and deadline."""

    SHORT = "short"
    LONG = "long"
    CAPTURE = "capture"


SINK = "sink"
"""The queue of results that any sink may take, and the name of that kind of process."""
STORE_TASK = "store"
"""The task of every result."""
DEFAULT_CONCURRENCY = {Lane.SHORT: 150, Lane.LONG: 32, Lane.CAPTURE: 64}
"""`-c` of a lane process when none is given."""


def task_of(lane: Lane) -> str:
    """The task's name, as Flower shows it."""
    return "capture" if lane is Lane.CAPTURE else f"generate.{lane}"


def sink_queue(node: str) -> str:
    """The queue of results whose states lie in the spool of this node."""
    return f"{SINK}.{node}"


def all_queues() -> tuple[str, ...]:
    """Every queue but the nodes' own."""
    return (*Lane, SINK)


def role_of(queues: Sequence[str]) -> Lane | None:
    """The lane that a worker started with these queues serves; None for a sink.

    Raises `UsageError` for none, for several, and for one that does not exist.
    """
    hint = "one of: -P threads -c 150 -Q short | -c 32 -Q long | -c 64 -Q capture | -c 1 -Q sink"
    if len(queues) != 1:
        said = ",".join(queues)
        raise UsageError(
            f"a worker serves one queue, and `-Q {said}` names {len(queues)}"
            if queues
            else "a worker serves one queue, and no `-Q` names it",
            code="worker.queues",
            hint=hint,
        )
    if queues[0] == SINK:
        return None
    try:
        return Lane(queues[0])
    except ValueError:
        raise UsageError(f"there is no queue `{queues[0]}`", code="worker.queues", hint=hint) from None
