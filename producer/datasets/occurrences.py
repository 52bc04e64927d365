"""Which occurrence of its token ids a prompt is within its dataset, in bounded memory.

The id of a prompt counts earlier rows with the same tokens. Only ids are remembered, so what was
stored before a kill is all that a resumed reading needs. 8 bytes a prompt: a dataset of ten million
rows takes 80 MB.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from storage.tokens import Tokens, prompt_id

RECENT = 65_536
"""Ids kept in a set before they are merged into the sorted array: merging copies all of it."""


class Occurrences:
    """The ids one dataset has given so far.

    Ids are told apart by their first 8 bytes: at ten million prompts two different ones meet with a
    chance of 1 in 100 000, and the second would only count as a repetition.
    """

    def __init__(self, dataset: str, stored: Iterable[bytes] = ()) -> None:
        """Begins with what is stored, in any order."""
        self._dataset = dataset
        self._sorted: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._recent: set[int] = set()
        self._repeated: dict[int, int] = {}
        for one in stored:
            self._add(_key(one))

    def next_id(self, tokens: Tokens) -> bytes:
        """The id of these tokens' next occurrence, which is thereby taken."""
        first = prompt_id(self._dataset, tokens)
        key = _key(first)
        if key not in self:
            self._add(key)
            return first
        occurrence = self._repeated.get(key, 0) + 1
        while _key(later := prompt_id(self._dataset, tokens, occurrence=occurrence)) in self:
            occurrence += 1
        self._repeated[key] = occurrence
        self._add(_key(later))
        return later

    def __contains__(self, key: int) -> bool:
        if key in self._recent:
            return True
        at = int(np.searchsorted(self._sorted, np.uint64(key)))
        return at < self._sorted.size and int(self._sorted[at]) == key

    def _add(self, key: int) -> None:
        self._recent.add(key)
        if len(self._recent) >= RECENT:
            fresh = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = np.sort(np.concatenate([self._sorted, fresh]))
            self._recent.clear()


def _key(prompt: bytes) -> int:
    return int.from_bytes(prompt[:8], "little")
