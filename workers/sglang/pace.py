"""How often a lane looks at its servers."""

from dataclasses import dataclass

from workers.sglang.outcomes import RECONNECT, Backoff


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often servers are looked at; tests hurry."""

    recheck_s: float = 10.0
    """Between looks at a server that is unsuitable: somebody may restart it with other flags."""
    watch_s: float = 30.0
    """Between looks at a healthy one. A call's own error is noticed at once; these find the
    server that hangs, and the one that was restarted while no call was running."""
    silent_s: float = 10.0
    """With calls running and none of them ending for so long, it is looked at before its time."""
    doubt_s: float = 5.0
    """A look that is not answered for so long makes it suspect: no new calls until it is."""
    advance_s: float = 25.0
    """In which it must have produced a token: `/health_generate` itself gives up after 20."""
    quiet_s: float = 1.0
    """Without a word from it and with no call running, it is looked at before the next call: less than
    any server takes to start."""
    strikes: int = 3
    """Looks in a row that must fail before a healthy server is away: a long prefill fails one."""
    strike_s: float = 5.0
    """Between looks after a failed one."""
    reconnect: Backoff = RECONNECT
    """Between attempts to reach a server that is away."""
