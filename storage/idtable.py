"""A table from 16-byte ids to integers for millions of them: sorted arrays, 24 bytes an entry.

The first value given for an id is kept. Whole blocks are looked up at once. Not a dict, which
takes six times the memory and is slower to fill.
"""

import numpy as np
from numpy.typing import NDArray

ABSENT = -1
"""What an id that is not in the table gives."""


class IdTable:
    """Ids and their values; not safe to change from two threads."""

    def __init__(self) -> None:
        self._high = np.empty(0, np.uint64)
        self._low = np.empty(0, np.uint64)
        self._value = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._value)

    def add(self, ids: NDArray[np.uint8], values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Enter ids uint8 [N, 16]; which of them are new, in the order given."""
        high, low = _halves(ids)
        order = np.argsort(high)
        if np.any(high[order[1:]] == high[order[:-1]]):
            order = np.lexsort((low, high))  # an id comes twice: the first must stay the first
        high, low = high[order], low[order]
        first = np.ones(len(order), bool)
        first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        first &= self._find(high, low) == ABSENT
        high, low, order = high[first], low[first], order[first]
        at = self._slot(high, low)
        self._high = np.insert(self._high, at, high)
        self._low = np.insert(self._low, at, low)
        self._value = np.insert(self._value, at, values[order])
        new = np.zeros(len(ids), bool)
        new[order] = True
        return new

    def find(self, ids: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The value of each id of uint8 [N, 16], `ABSENT` where there is none."""
        return self._find(*_halves(ids))

    def replace(self, ids: NDArray[np.uint8], values: NDArray[np.int64]) -> None:
        """Give ids that are in the table other values."""
        high, low = _halves(ids)
        self._value[self._slot(high, low)] = values

    def _find(self, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.int64]:
        out = np.full(len(high), ABSENT, np.int64)
        if not len(self._high):
            return out
        # Looked up in order, a million ids walk the table once instead of jumping about in it.
        order = np.argsort(high)
        high, low = high[order], low[order]
        at = np.minimum(self._slot(high, low), len(self._high) - 1)
        same = (self._high[at] == high) & (self._low[at] == low)
        out[order[same]] = self._value[at[same]]
        return out

    def _slot(self, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Where each pair is or belongs; ids with equal first halves are rare, so few steps."""
        at = np.searchsorted(self._high, high)
        while len(self._high):
            inside = np.minimum(at, len(self._high) - 1)
            behind = (at < len(self._high)) & (self._high[inside] == high) & (self._low[inside] < low)
            if not behind.any():
                break
            at += behind
        return at


def _halves(ids: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    pairs = np.ascontiguousarray(ids).view(">u8").reshape(-1, 2)
    return pairs[:, 0].astype(np.uint64), pairs[:, 1].astype(np.uint64)
