"""bfloat16 in NumPy, which has no such type: rounding float64 values to it, and its 16 bits.

Values travel as float64 that happen to be bfloat16 numbers, so products of two are exact and sums
nearly so: what is added in which order then almost never (about once in 2^44 roundings) reaches the
rounded result. That is what makes a request's states independent of its batch and its chunks.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bits = NDArray[np.uint16]

_SPLITTER = float(2**45 + 1)
"""Veltkamp's constant for 53 - 45 = 8 significant bits, which is what bfloat16 has."""


def rounded(values: Floats) -> Floats:
    """`values` to the nearest bfloat16, ties to even, in place.

    Dekker, "A floating-point technique for extending the available precision" (1971). Exact for
    anything a bfloat16 can hold up to 2^82; infinities become NaN, which the model never makes.
    """
    scaled = values * _SPLITTER
    np.subtract(scaled, values, out=values)
    np.subtract(scaled, values, out=values)
    return values


def to_bits(values: Floats) -> Bits:
    """The 16 bits of values that already are bfloat16 numbers."""
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def from_bits(bits: Bits) -> NDArray[np.float32]:
    """The float32 numbers behind the 16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
