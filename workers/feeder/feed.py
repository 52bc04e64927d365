"""What the feeder knows of one dataset: its prompts, what is wanted of them, which orders are out.

Counts and picks; publishes nothing. The window's bits are `window.BITS`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.index import DatasetIndex, Outcome
from storage.sample import Stage
from workers.board.scoreboard import Progress
from workers.broker.queues import Lane
from workers.feeder.orders import MESSAGE_BYTES, PLACE, TOKEN_BYTES
from workers.feeder.window import BITS


@dataclass(slots=True)
class Feed:
    """One dataset of a run."""

    dataset: DatasetIndex
    lane: str
    """As the manifest says it: `auto` goes by length."""
    lanes: NDArray[np.uint8]
    """Per prompt, place in `Lane` of the lane that gives it its response."""
    progress: Progress
    reading: bool
    """Whether `enqueue` has not read as far as is wanted."""

    def out(self, lane: Lane, out: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Positions of the orders of this lane that are out."""
        if lane is Lane.CAPTURE:
            return np.flatnonzero(out & BITS[Stage.CAPTURE])
        return np.flatnonzero(((out & BITS[Stage.GENERATE]) != 0) & (self.lanes == PLACE[lane]))

    def candidates(self, lane: Lane, out: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Positions that need this lane and have no order out, ascending."""
        missing = self.progress.plan.missing
        outcome, missing_out = self.dataset.outcome[missing], out[missing]
        if lane is Lane.CAPTURE:
            free = (outcome == Outcome.RESPONDED) & ((missing_out & BITS[Stage.CAPTURE]) == 0)
        else:
            free = (outcome == Outcome.NONE) & ((missing_out & BITS[Stage.GENERATE]) == 0)
            free &= self.lanes[missing] == PLACE[lane]
        found: NDArray[np.int64] = missing[free]
        return found

    def given(self) -> NDArray[np.int64]:
        """Positions of rows that came with their tokens and have no response yet."""
        missing = self.progress.plan.missing
        none = self.dataset.outcome[missing] == Outcome.NONE
        found: NDArray[np.int64] = missing[none & (self.lanes[missing] == PLACE[Lane.CAPTURE])]
        return found

    def settled(self, stage: Stage, out: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Positions whose order of this stage is out and need not be any more.

        Orders to generate for a closed dataset are among them: they are acknowledged unrun, so
        no result will come.
        """
        outcome = self.dataset.outcome
        if stage is Stage.GENERATE:
            over = (outcome != Outcome.NONE) | self.progress.plan.closed
        else:
            over = (outcome == Outcome.STORED) | (outcome == Outcome.DEAD)
        return np.flatnonzero(((out & BITS[stage]) != 0) & over)

    def sizes(self, lane: Lane) -> NDArray[np.int64]:
        """About how many bytes the order for each prompt takes in Redis."""
        tokens = self.dataset.sample_tokens if lane is Lane.CAPTURE else self.dataset.prompt_tokens
        return MESSAGE_BYTES + TOKEN_BYTES * tokens.astype(np.int64)
