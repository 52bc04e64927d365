"""One server as a lane process knows it: its state and why, its calls, when it was last heard of.

It asks the server nothing: connecting, watching and leaving it are the pool's (`servers.py`).
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from storage.errors import EyasError
from workers.board.processes import ServerSnapshot, ServerState
from workers.sglang.facts import ServerFacts
from workers.sglang.outcomes import ServerAwayError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Server:
    """One address. Of the pool's event loop; other threads read its snapshot."""

    snapshot: ServerSnapshot
    task: asyncio.Task[None] | None = None
    facts: ServerFacts | None = None
    heard: float = -math.inf
    """When it was last known to be what it was, monotonic seconds."""
    look: asyncio.Task[ServerAwayError | None] | None = None
    """The question whether it still is, while it is asked."""
    running: int = 0
    """Calls that have been sent."""
    lost: ServerAwayError | None = None
    """Why it was left, until it is connected again."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    calls: dict[asyncio.Task[Any], None] = field(default_factory=dict)

    def silent_s(self) -> float:
        """For how long calls have been running and none of them has ended; 0 while none runs."""
        return time.monotonic() - self.heard if self.running else 0.0

    def become(self, state: ServerState, error: EyasError | None = None) -> None:
        """Enter a state, or stay in it for another reason; a change is one line in the log."""
        url, now = self.snapshot.url, self.snapshot
        reason = "" if error is None else " · ".join(filter(None, (error.message, error.hint)))
        if state is not now.state:
            log.info("server.%s url=%s reason=%r", state, url, reason)
            self.snapshot = ServerSnapshot(url=url, state=state, since=time.time(), reason=reason)
        elif reason != now.reason:
            self.snapshot = replace(now, reason=reason)
