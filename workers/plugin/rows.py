"""One request's rows on the host, by absolute position, and which positions are covered.

Rows come in any order: chunks of a prefill, single rows of decoding, and after a retraction
everything once more; what comes later replaces what came before. NumPy only.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
"""bf16 bits."""
SINGLE_ROWS = 256
"""Rows of decoding that share one allocation."""


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


class Rows:
    """What has come of one request."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._growing: Part | None = None
        """The last part, while single rows are being added to it."""

    @property
    def size_bytes(self) -> int:
        """Host memory held."""
        return sum(part.final.nbytes + (0 if part.aux is None else part.aux.nbytes) for part in self._parts)

    @property
    def hidden_size(self) -> int:
        """H; there must be rows."""
        return int(self._parts[0].final.shape[1])

    def put(self, part: Part) -> None:
        """Keep the rows as they are, without a copy: nobody else may write to them."""
        if part.count:
            self._parts = [old for old in self._parts if not part.start <= old.start <= old.stop <= part.stop]
            self._parts.append(part)
            self._growing = None

    def put_row(self, position: int, aux: Bits | None, final: Bits) -> None:
        """Copy one row, aux [K · H] and final [H]."""
        part = self._growing
        if part is None or part.stop != position or part.count == len(part.final):
            part = Part(
                start=position,
                count=0,
                aux=None if aux is None else np.empty((SINGLE_ROWS, len(aux)), np.uint16),
                final=np.empty((SINGLE_ROWS, len(final)), np.uint16),
            )
            self._parts.append(part)
            self._growing = part
        part.final[part.count] = final
        if part.aux is not None and aux is not None:
            part.aux[part.count] = aux
        part.count += 1

    def clear(self) -> None:
        """Give the memory back."""
        self._parts = []
        self._growing = None

    def covered(self, total: int) -> int:
        """How many of the first `total` positions have a row."""
        return int(np.count_nonzero(self._owners(total) >= 0))

    def first_missing(self, total: int) -> int | None:
        """The first of `total` positions without a row."""
        missing = np.flatnonzero(self._owners(total) < 0)
        return int(missing[0]) if len(missing) else None

    def blocks(self, total: int, columns: Sequence[int], block_rows: int) -> Iterator[Bits]:
        """The first `total` rows in order, uint16 [t, len(columns), H], at most `block_rows` at once.

        A column below K is that auxiliary layer, K is the final state. Each block is overwritten
        by the next. All positions must be covered.
        """
        buffer = np.empty((min(total, block_rows), len(columns), self.hidden_size), np.uint16)
        filled = 0
        for part, start, stop in self._stretches(total):
            while start < stop:
                count = min(stop - start, len(buffer) - filled)
                _fill(buffer[filled : filled + count], part, start - part.start, columns)
                start += count
                filled += count
                if filled == len(buffer):
                    yield buffer
                    filled = 0
        if filled:
            yield buffer[:filled]

    def _owners(self, total: int) -> NDArray[np.int32]:
        """Which part each position's row is in; -1 for none."""
        owners = np.full(total, -1, np.int32)
        for number, part in enumerate(self._parts):
            owners[part.start : part.stop] = number
        return owners

    def _stretches(self, total: int) -> Iterator[tuple[Part, int, int]]:
        """Parts and the positions [start, stop) to take from each, in order of positions."""
        owners = self._owners(total)
        edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), total]
        for start, stop in itertools.pairwise(edges):
            if owners[start] < 0:
                raise ValueError(f"no rows from {start} to {stop}")
            yield self._parts[owners[start]], start, stop


def _fill(block: Bits, part: Part, first: int, columns: Sequence[int]) -> None:
    """Write rows `first`… of the part into block [t, columns, H]."""
    count, _, hidden = block.shape
    layers = 0 if part.aux is None else part.aux.shape[1] // hidden
    whole = tuple(columns) == tuple(range(layers + 1))
    if part.aux is not None:
        aux = part.aux[first : first + count].reshape(count, layers, hidden)
        if whole:
            block[:, :layers] = aux
        else:
            for place, column in enumerate(columns):
                if column < layers:
                    block[:, place] = aux[:, column]
    if layers in columns:
        block[:, tuple(columns).index(layers)] = part.final[first : first + count]
