"""Rows on the host by absolute position: a part as it comes, and which positions have come. NumPy only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
"""bf16 bits."""


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """Rows of consecutive positions."""

    start: int
    """Position of the first."""
    count: int
    """Rows that are filled."""
    aux: Bits | None
    """[rows, K · H]; None on a server without auxiliary layers."""
    final: Bits
    """[rows, H]."""

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.count

    @property
    def size_bytes(self) -> int:
        """Host memory held, also by rows that are not filled yet."""
        return self.final.nbytes + (0 if self.aux is None else self.aux.nbytes)

    def fill(self, block: Bits, first: int, columns: Sequence[int]) -> None:
        """Write rows `first`… into block [t, len(columns), H].

        A column below K is that auxiliary layer, K is the final state.
        """
        count, _, hidden = block.shape
        layers = 0 if self.aux is None else self.aux.shape[1] // hidden
        whole = tuple(columns) == tuple(range(layers + 1))
        if self.aux is not None:
            aux = self.aux[first : first + count].reshape(count, layers, hidden)
            if whole:
                block[:, :layers] = aux
            else:
                for place, column in enumerate(columns):
                    if column < layers:
                        block[:, place] = aux[:, column]
        if layers in columns:
            block[:, tuple(columns).index(layers)] = self.final[first : first + count]


class Coverage:
    """Positions that have come, in any order: chunks, single ones, and after a retraction once more."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []
        """[start, stop), ascending, apart from each other."""

    def add(self, start: int, stop: int) -> None:
        """These have come."""
        if self._spans and self._spans[-1][1] == start:  # as nearly all do
            self._spans[-1] = self._spans[-1][0], stop
            return
        apart = []
        for span in self._spans:
            if span[1] < start or stop < span[0]:
                apart.append(span)
            else:
                start, stop = min(start, span[0]), max(stop, span[1])
        self._spans = sorted([*apart, (start, stop)])

    def count(self, total: int) -> int:
        """How many of the first `total` positions have come."""
        return sum(max(0, min(stop, total) - start) for start, stop in self._spans)

    def first_missing(self, total: int) -> int | None:
        """The first of `total` positions that has not."""
        reached = self._spans[0][1] if self._spans and self._spans[0][0] == 0 else 0
        return reached if reached < total else None
