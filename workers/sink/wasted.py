"""Calls that were made for nothing: their result was stored already, by another call.

A lease that was lost, a batch published twice, two runs of `enqueue` at once: each costs a call, never a
second sample. A result that merely comes again, because the sink died before it acknowledged it,
cost none and is told apart by what the server said of the call; for states only as long as the
sink lives.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from storage.errors import EyasError
from storage.sample import Finish, Response, States
from storage.store import Store
from workers.broker.messages import Captured, Failed, Responded, Result

logger = logging.getLogger(__name__)

REMEMBERED = 20_000
"""Spool names of states that were committed: more than a window of messages."""


@dataclass(frozen=True, slots=True)
class Wasted:
    """What it came to."""

    calls: int = 0
    tokens: int = 0
    """Response tokens of calls that generate, rows of calls that capture."""


NOTHING = Wasted()


class Waste:
    """What one sink finds, batch by batch, before it commits them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._captured: OrderedDict[str, None] = OrderedDict()

    def of(self, results: Sequence[Result]) -> Wasted:
        """The calls of this batch that were made for nothing; none where the store cannot tell now."""
        try:
            tokens = [*self._responses(results), *self._captures(results), *self._failures(results)]
        except (EyasError, OSError) as error:
            logger.debug("waste.uncounted error=%r", error)
            return NOTHING
        # An edge: a figure for people must not keep a batch from being stored.
        except Exception:
            logger.exception("waste.uncounted")
            return NOTHING
        return Wasted(len(tokens), sum(tokens))

    def _responses(self, results: Sequence[Result]) -> Iterator[int]:
        batch = [r.response for r in results if isinstance(r, Responded)]
        known = self._store.known_responses([response.id for response in batch])
        first: dict[bytes, Response] = {}
        for response, is_known in zip(batch, known, strict=True):
            visible = self._store.response(response.id) if is_known else first.get(response.id)
            if visible is None:
                first[response.id] = response
            elif response.finish is not Finish.GIVEN and not _same_call(visible, response):
                yield len(response.tokens) - response.prompt_length

    def _captures(self, results: Sequence[Result]) -> Iterator[int]:
        batch = [r.states for r in results if isinstance(r, Captured)]
        for capture in {states.capture for states in batch}:
            yield from self._of_capture(capture, [s for s in batch if s.capture == capture])

    def _of_capture(self, capture: str, batch: Sequence[States]) -> Iterator[int]:
        pairs = [(states.id, states.digest) for states in batch]
        first: set[tuple[bytes, bytes]] = set()
        known = self._store.known_states(capture, pairs)
        for states, pair, is_known in zip(batch, pairs, known, strict=True):
            if states.spool.name not in self._captured and (is_known or pair in first):
                yield states.spool.shape[0]
            first.add(pair)
            self._captured[states.spool.name] = None
            while len(self._captured) > REMEMBERED:
                self._captured.popitem(last=False)

    def _failures(self, results: Sequence[Result]) -> Iterator[int]:
        """Of calls that failed where another has succeeded."""
        batch = [r.failure for r in results if isinstance(r, Failed) and r.failure.digest is None]
        for is_known in self._store.known_responses([failure.id for failure in batch]):
            if is_known:
                yield 0


def _same_call(one: Response, other: Response) -> bool:
    """Whether both are the result of one call, as far as its server's clock tells."""
    return (one.digest, one.timings, one.facts_id) == (other.digest, other.timings, other.facts_id)
