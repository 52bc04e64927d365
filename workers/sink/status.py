"""What a sink says of itself: its state in words, and what it has done since it started.

Written by the sink's threads, read once a second for the snapshot; nothing decides by it.
"""

import logging
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from storage.spool import Spool
from workers.board.processes import ProcessSnapshot
from workers.broker.queues import SINK
from workers.sink.commit import Tally

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SinkStatus:
    """Counters since the process started, and why it does nothing just now, if so."""

    state: str = "waiting"
    """`running`, `waiting` for its store, or `paused`: what it holds cannot be committed now."""
    says: str = "has not looked for its store yet"
    done: int = 0
    """Messages settled."""
    failed: int = 0
    """Dead letters stored."""
    wasted: int = 0
    """Calls whose result was stored already."""
    wasted_tokens: int = 0
    tokens: int = 0
    lost: int = 0
    """States that were gone from the spool."""
    aside: int = 0
    """Messages set aside."""
    written_bytes: int = 0
    started: float = field(default_factory=time.time)

    def become(self, state: str, says: str = "") -> None:
        """Change the state; a change is logged, once."""
        if (state, says) != (self.state, self.says):
            logger.info("sink.%s why=%s", state, says or "-")
            self.state, self.says = state, says

    def add(self, messages: int, tally: Tally) -> None:
        """Count a batch that was committed."""
        self.done += messages
        self.failed += tally.failures
        self.wasted += tally.wasted.calls
        self.wasted_tokens += tally.wasted.tokens
        self.tokens += tally.tokens
        self.lost += tally.lost
        self.written_bytes += tally.state_bytes

    def snapshot(
        self, *, name: str, node: str, held: int, spool: Spool, output: Path | None
    ) -> ProcessSnapshot:
        """What Redis is told; `output` is the folder of the store, where there is one."""
        usage = spool.usage()
        return ProcessSnapshot(
            name=name,
            lane=SINK,
            node=node,
            pid=os.getpid(),
            at=time.time(),
            started=self.started,
            state=self.state,
            says=self.says,
            in_flight=held,
            done=self.done,
            failed=self.failed,
            wasted=self.wasted,
            wasted_tokens=self.wasted_tokens,
            tokens=self.tokens,
            lost=self.lost,
            aside=self.aside,
            written_bytes=self.written_bytes,
            spool_bytes=usage.used_bytes,
            spool_max_bytes=spool.max_bytes,
            spool_oldest=usage.oldest,
            disk_free_bytes=_free_bytes(output),
        )


def _free_bytes(output: Path | None) -> int | None:
    """None also while the folder is away: the sink must say so, not fall silent."""
    try:
        return None if output is None else shutil.disk_usage(output).free
    except OSError:
        return None
