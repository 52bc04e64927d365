"""Committing in spite of errors: waited for when they pass, narrowed down to one item when they do not.

Knows neither what a commit does nor what becomes of an item that is refused: both are given
(`commit.py`). Nothing is acknowledged or deleted here.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from redis import RedisError

from storage.errors import DamagedError, FullError, RunReplacedError, UnavailableError
from storage.sample import Failure, Response, States
from storage.store import Store
from workers.stopping import StoppedError

logger = logging.getLogger(__name__)

TRIES = 3
"""How often one item alone is tried before it becomes a dead letter."""
WAITS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Between attempts while the disk is full, the store away or damaged; the last one for ever."""
ROOM_BYTES = 64_000_000
"""Free space above the batch's own size at which a full disk is tried again before its time."""

Item = TypeVar("Item", States, Response, Failure)


class Host(Protocol):
    """What the sink asks of the process it runs in."""

    def pause(self, seconds: float, why: str) -> None:
        """Wait, and say why; raises `StoppedError` when the process ends."""

    def resume(self) -> None:
        """Say that all is well again."""


class Endurance:
    """Commits to one store, for as long as it takes. One thread uses it."""

    def __init__(self, store: Store, host: Host) -> None:
        self._store, self._host = store, host

    def in_parts(
        self,
        items: Sequence[Item],
        commit: Callable[[Sequence[Item]], int],
        refuse: Callable[[Item, Exception], None],
    ) -> list[int]:
        """Commit all items; on an error each half for itself, down to the item that causes it."""
        counts = []
        parts = [items] if items else []
        while parts:
            part = parts.pop()
            for attempt in range(1, TRIES + 1):
                try:
                    counts.append(self.patiently(commit, part, _size_bytes(part)))
                    break
                except (StoppedError, RunReplacedError):
                    raise
                # An edge: whatever is wrong with one item must not stop the others for ever.
                except Exception as error:
                    if len(part) > 1:
                        middle = len(part) // 2
                        parts += [part[middle:], part[:middle]]
                        break
                    if attempt == TRIES:
                        logger.error("sink.refused id=%s error=%r", part[0].id.hex(), error)
                        refuse(part[0], error)
        return counts

    def patiently(
        self, commit: Callable[[Sequence[Item]], int], part: Sequence[Item], needed_bytes: int
    ) -> int:
        """`commit(part)`, again and again while the reason is not in the part."""
        attempt = 0
        while True:
            try:
                count = commit(part)
                break
            except FullError as error:
                why = error.message
            # A damaged segment is no item's fault either: refused for it, every result would be lost.
            except (UnavailableError, DamagedError, OSError, RedisError) as error:
                why = f"cannot commit: {error}"
            self._wait(WAITS_S[min(attempt, len(WAITS_S) - 1)], why, needed_bytes)
            attempt += 1
        if attempt:
            self._host.resume()
        return count

    def _wait(self, longest_s: float, why: str, needed_bytes: int) -> None:
        """Wait so long, or until there is room again where there was none."""
        short = self._free_bytes() < needed_bytes + ROOM_BYTES
        left_s = longest_s
        while left_s > 0:
            self._host.pause(min(1.0, left_s), why)
            left_s -= 1.0
            if short and self._free_bytes() >= needed_bytes + ROOM_BYTES:
                return

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self._store.path).free
        except OSError:
            return 0


def _size_bytes(items: Sequence[Response | States | Failure]) -> int:
    """Bytes on the disk, at most, roughly."""
    return sum(
        item.spool.size_bytes
        if isinstance(item, States)
        else 4 * len(item.tokens)
        if isinstance(item, Response)
        else 1000
        for item in items
    )
