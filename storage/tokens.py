"""Token ids as bytes: the one encoding under every identity, and the identities made from it.

Ids are BLAKE2b with 16 bytes of output over little-endian integers (RFC 7693), so that any
language can compute them. Nothing here knows files.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from storage.errors import UsageError

ID_BYTES = 16
"""Length of a prompt id and of a digest, in bytes."""

Tokens = NDArray[np.int32]
"""Token ids, int32 [T]."""


def as_tokens(ids: Sequence[int] | NDArray[np.integer]) -> Tokens:
    """The ids as int32 [T].

    Raises `UsageError` for an id that is negative or does not fit in int32, and for what is no number.
    """
    try:
        wide = np.asarray(ids)
    except (ValueError, TypeError):  # lists of unequal length inside
        wide = np.asarray([None])
    if wide.ndim != 1 or (wide.size and wide.dtype.kind not in "iu"):
        raise UsageError("token ids are not one list of whole numbers", code="tokens.range")
    if wide.size and (wide.min() < 0 or wide.max() > np.iinfo(np.int32).max):
        bad = int(wide.min()) if wide.min() < 0 else int(wide.max())
        raise UsageError(f"`{bad}` is not a token id", code="tokens.range")
    return wide.astype(np.int32)


def token_bytes(tokens: Tokens) -> bytes:
    """The ids as int32 little-endian, whatever the machine's order."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def tokens_from_bytes(data: bytes | memoryview) -> Tokens:
    """The inverse of `token_bytes`: a read-only int32 [T]."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


def prompt_id(dataset: str, tokens: Tokens, *, occurrence: int = 0, replica: int = 0) -> bytes:
    """The identity of a prompt: 16 bytes over u32 name length, name, u32 occurrence, u32 replica, ids.

    `occurrence` counts earlier rows of the dataset with the same ids, `replica` the responses
    asked for one prompt; both start at 0. All integers are little-endian.
    """
    name = dataset.encode()
    digest = hashlib.blake2b(digest_size=ID_BYTES)
    digest.update(len(name).to_bytes(4, "little") + name)
    digest.update(occurrence.to_bytes(4, "little") + replica.to_bytes(4, "little"))
    digest.update(token_bytes(tokens))
    return digest.digest()


def response_digest(tokens: Tokens) -> bytes:
    """The identity of a response: 16 bytes over the prompt's and the response's ids."""
    return hashlib.blake2b(token_bytes(tokens), digest_size=ID_BYTES).digest()
