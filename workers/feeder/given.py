"""Rows that came with their tokens and have no response yet: which the feeder publishes, and when.

`enqueue` commits them itself; these are left where it was killed. Pure: publishes nothing.
"""

from collections.abc import Sequence

GIVEN_AFTER_S = 60.0
"""How long such rows are left to `enqueue`, and results on their way to the sink."""
GIVEN_WAITING = 2000
"""Results that may wait for the sinks before more of these are published."""


class GivenRows:
    """What one feeder knows of them."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._sent: dict[str, set[int]] = {}

    def due(self, name: str, given: Sequence[int], *, now: float, waiting: int, most: int) -> list[int]:
        """The dataset's positions to publish now, `most` at a time and as fast as the sinks take them.

        `given` are those without a response, `waiting` the results that no sink has taken. When all
        are out, those that were lost on their way follow after another while.
        """
        if not given:
            self._since.pop(name, None)
            self._sent.pop(name, None)
            return []
        if now - self._since.setdefault(name, now) < GIVEN_AFTER_S or waiting >= GIVEN_WAITING:
            return []
        sent = self._sent.setdefault(name, set())
        due = [at for at in given if at not in sent][:most]
        if due:
            sent.update(due)
        else:
            self._since[name] = now
            sent.clear()
        return due
