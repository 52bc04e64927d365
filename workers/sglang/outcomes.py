"""What becomes of a call that did not end well: the one table from error codes to outcomes.

Every failure of a call to a server has a code below; the table says whether it is tried again,
goes to another server or ends as a dead letter. It does not wait or count: `execute.py` does.
"""

import random
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from storage.errors import EyasError, UnavailableError

ATTEMPTS = 3
"""k: failures on a living server before a sample is a dead letter."""
BUSY_PATIENCE_S = 10.0
"""How long a server may say that it is busy before its calls go elsewhere."""


class Outcome(StrEnum):
    """What happens next."""

    AGAIN = "again"
    """Counted, and tried again on the same server under a fresh rid and extra_key; at k, dead."""
    WAIT = "wait"
    """Not counted: tried again after a pause, and elsewhere when patience ends."""
    ELSEWHERE = "elsewhere"
    """Not counted: the server takes no calls for now, the order goes back to the queue."""
    DEAD = "dead"
    """A dead letter at once: no attempt could end otherwise."""


OUTCOMES = MappingProxyType(
    {
        # the server does not answer
        "server.unreachable": Outcome.ELSEWHERE,  # refused, no such host, no route
        "server.died": Outcome.ELSEWHERE,  # the connection broke and nothing answers now
        "server.hanging": Outcome.ELSEWHERE,  # past the deadline, and a one-token probe is not answered
        "server.key": Outcome.ELSEWHERE,  # 401, 403: nothing is wrong with the sample
        "server.changed": Outcome.ELSEWHERE,  # it is no longer what it was when connected
        "server.not_found": Outcome.ELSEWHERE,  # 404, a redirect: something else answers there now
        "server.gateway": Outcome.ELSEWHERE,  # 502, 504: what a proxy says when the server behind it died
        "server.busy": Outcome.WAIT,  # 408, 429, 503: queue full, draining, a router without workers
        # the server answers, this call did not go well
        "server.broke": Outcome.AGAIN,  # the connection broke, the server lives
        "server.slow": Outcome.AGAIN,  # past the deadline, the server lives
        "server.error": Outcome.AGAIN,  # 500
        "server.duplicate_rid": Outcome.AGAIN,
        "server.refused": Outcome.DEAD,  # 400, 413, 422 from a server that is what it was
        # the reply is not what was asked for
        "reply.garbage": Outcome.AGAIN,
        "reply.aborted": Outcome.AGAIN,
        "reply.tokens": Outcome.AGAIN,
        "reply.counts": Outcome.AGAIN,
        "states.missing": Outcome.AGAIN,
        "states.short": Outcome.AGAIN,
        "states.shape": Outcome.AGAIN,
        "states.layers": Outcome.AGAIN,
        "states.not_finite": Outcome.AGAIN,
        "states.zero": Outcome.AGAIN,
        "states.lost": Outcome.AGAIN,
        "states.decoder": Outcome.AGAIN,  # the decoding process died
        # nothing was sent
        "prompt.tokens": Outcome.DEAD,  # an id outside the vocabulary kills the whole server
        "prompt.long": Outcome.DEAD,
        "states.too_big": Outcome.DEAD,  # than all of the spool: waiting for room would never end
    }
)
"""Code → outcome. A code that is not here is a fault of ours: `KeyError`."""


class CallError(EyasError):
    """A call that did not end well; `code` says how and the table what follows."""


class ServerAwayError(UnavailableError):
    """A server takes no calls now: its orders go back to the queue and nothing is counted.

    `in_flight` says that the call was running when the server went: it may be what killed it.
    """

    def __init__(self, message: str, *, code: str, hint: str | None = None, in_flight: bool = False) -> None:
        super().__init__(message, code=code, hint=hint)
        self.in_flight = in_flight


class StaleOrderError(EyasError):
    """An order for a capture that the run no longer wants: acknowledged, nothing is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses that double from the first to the longest, each spread over half to all of itself."""

    first_s: float
    longest_s: float

    def pause_s(self, failures: int) -> float:
        """The pause after so many failures in a row, from 1."""
        whole = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30))
        # Jitter: the calls of 150 threads fail together and must not come back together.
        return whole * random.uniform(0.5, 1.0)  # noqa: S311


AGAIN = Backoff(first_s=0.5, longest_s=4.0)
BUSY = Backoff(first_s=0.5, longest_s=4.0)
RECONNECT = Backoff(first_s=0.5, longest_s=10.0)


def outcome(error: CallError) -> Outcome:
    """What follows from this error."""
    return OUTCOMES[error.code]
