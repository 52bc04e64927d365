"""Where a response ends: random weights never stop by themselves, so the prompt decides its length.

The length is a geometric draw out of a hash of the prompt, so a prompt always ends at the same place,
whatever the sampling and the batch.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray


def stop_at(tokens: NDArray[np.int64], mean_tokens: float) -> int:
    """Output tokens of this prompt's response, the end-of-sequence token included; at least 2.

    Geometric with the given mean: after the first, every token is the last with the same probability.
    """
    digest = hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8, person=b"eyas-stop").digest()
    uniform = (int.from_bytes(digest, "little") >> 11) / 2**53
    mean_after_first = max(mean_tokens - 1, 1.0)
    if mean_after_first == 1.0:
        return 2
    return 2 + int(math.log1p(-uniform) / math.log1p(-1 / mean_after_first))


def stop_ids(eos_ids: tuple[int, ...], asked: frozenset[int], ignore_eos: bool) -> frozenset[int]:
    """The tokens that end a response when the model picks them."""
    return frozenset() if ignore_eos else asked | frozenset(eos_ids)
