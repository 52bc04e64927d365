"""One pass over a sample's states in the spool, beside their second capture: figures, no judgement.

Holds a block of rows at once, however long the sample is. What the figures mean is in `verdict.py`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.sample import SpoolRef
from storage.spool import Spool, SpoolReader
from workers.sglang.audit.checkpoint import as_floats

Floats = NDArray[np.float32]
BLOCK_BYTES = 4 << 20
"""bf16 bytes of a block; the arithmetic on it takes about ten times as much."""
LARGEST = 1e6
"""Stands for an error that is not finite: JSON has no word for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one pass gives."""

    errors: Floats
    """‖a − b‖ ÷ ‖a‖ of each row of each layer, [T, L]."""
    cosines: Floats
    """Cosine of each row and its second capture, [T, L]."""
    rms: Floats | None
    """Of final state ÷ norm weight, [T]; None without a head."""
    tail: Floats | None
    """The final states that were asked for, [k, H]; None without a final state."""


def measure(
    spool: Spool,
    first: SpoolRef,
    second: SpoolRef,
    *,
    final: int | None = None,
    norm: Floats | None = None,
    tail: slice = slice(0, 0),
) -> Measured:
    """Compare the rows that both have, in order.

    `final` is the place of the final state among the L layers, `norm` what the final norm
    multiplies by, `tail` which rows' final states to return. Raises `SpoolLostError`.
    """
    layers, hidden = first.shape[1:]
    rows = min(first.shape[0], second.shape[0])
    errors, cosines = np.empty((rows, layers), np.float32), np.empty((rows, layers), np.float32)
    rms = np.empty(rows, np.float32) if final is not None and norm is not None else None
    tails: list[Floats] = []
    with spool.reader(first) as one, spool.reader(second) as other:
        step = max(1, BLOCK_BYTES // (2 * layers * hidden))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            a, b = _next(one, (stop - start, layers, hidden)), _next(other, (stop - start, layers, hidden))
            errors[start:stop], cosines[start:stop] = _differences(a, b)
            if final is None:
                continue
            if rms is not None and norm is not None:
                rms[start:stop] = _rms(a[:, final], norm)
            low, high = max(start, tail.start), min(stop, tail.stop)
            if low < high:
                tails.append(a[low - start : high - start, final].copy())
    return Measured(errors=errors, cosines=cosines, rms=rms, tail=np.concatenate(tails) if tails else None)


def _next(reader: SpoolReader, shape: tuple[int, int, int]) -> Floats:
    bits = np.empty(shape, np.uint16)
    reader.readinto(bits)
    return as_floats(bits)


def _differences(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Relative errors and cosines of rows, each [t, L]."""
    with np.errstate(all="ignore"):
        squares_a, squares_b = np.einsum("tlh,tlh->tl", a, a), np.einsum("tlh,tlh->tl", b, b)
        cosines = np.einsum("tlh,tlh->tl", a, b) / np.sqrt(squares_a * squares_b)
        difference = a - b
        errors = np.sqrt(np.einsum("tlh,tlh->tl", difference, difference) / squares_a)
    return (
        np.nan_to_num(errors, nan=LARGEST, posinf=LARGEST).clip(0, LARGEST),
        np.nan_to_num(cosines, nan=-1.0, posinf=-1.0, neginf=-1.0).clip(-1, 1),
    )


def _rms(final: Floats, norm: Floats) -> Floats:
    """[t]; a weight of zero says nothing of what it multiplied."""
    used = np.abs(norm) > 1e-6 * np.abs(norm).max()
    normed = final[:, used] / norm[used]
    found: Floats = np.sqrt(np.einsum("th,th->t", normed, normed) / normed.shape[1])
    return np.nan_to_num(found, nan=LARGEST, posinf=LARGEST)
