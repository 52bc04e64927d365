"""Which orders go out next: round robin over datasets, within each queue's share of the window.

Pure: arrays in, positions out. Each queue has its own share, so that a lane without workers fills
its share and not the window.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

WINDOW_MESSAGES = 20_000
"""Messages out at once, at most: 10 million do not fit into Redis."""
WINDOW_BYTES = 256_000_000
"""Their bytes in Redis, at most."""
SHARES = 3
"""Queues that share the window: `short`, `long`, `capture`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much more may go into one queue."""

    messages: int = WINDOW_MESSAGES // SHARES
    size_bytes: int = WINDOW_BYTES // SHARES

    def less(self, messages: int, size_bytes: int) -> "Room":
        """What is left beside what is out already."""
        return Room(messages=self.messages - messages, size_bytes=self.size_bytes - size_bytes)


def choose(
    candidates: Mapping[str, NDArray[np.int64]], sizes: Mapping[str, NDArray[np.int64]], room: Room
) -> list[tuple[str, int]]:
    """Dataset and position of each order that goes out, in the order in which they go.

    `candidates`: dataset → positions, ascending; `sizes`: dataset → bytes of each candidate's
    message. One that is bigger than an empty share goes out alone.
    """
    chosen: list[tuple[str, int]] = []
    messages, size_bytes = room.messages, room.size_bytes
    if messages <= 0 or size_bytes <= 0:
        return chosen
    for name, position, size in _turns(candidates, sizes, messages):
        if messages <= 0 or (size > size_bytes and chosen):
            break
        chosen.append((name, position))
        messages, size_bytes = messages - 1, size_bytes - size
    return chosen


def _turns(
    candidates: Mapping[str, NDArray[np.int64]], sizes: Mapping[str, NDArray[np.int64]], most: int
) -> Iterator[tuple[str, int, int]]:
    """One of each dataset in turn, as long as any has one."""
    columns = [
        [(name, position, size) for position, size in zip(some.tolist(), of.tolist(), strict=True)]
        for name in sorted(candidates)
        for some, of in [(candidates[name][:most], sizes[name][:most])]
    ]
    for turn in zip_longest(*columns):
        yield from (one for one in turn if one is not None)


def by_dataset(chosen: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    """The chosen positions of each dataset, ascending."""
    found: dict[str, list[int]] = {}
    for name, position in chosen:
        found.setdefault(name, []).append(position)
    return {name: sorted(positions) for name, positions in found.items()}
