"""Ways to spoil a reply to `/generate` and the states that go with it. Knows no sockets.

Each is something a server, a proxy or a disk has done to somebody; what the tensor in the spool is
altered to has a valid checksum, so that only its values and its shape tell.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from storage.spool import Spool
from storage.spool_file import HEADER_BYTES

Reply = dict[str, Any]
NAN = 0x7FC0
"""A quiet NaN in bf16."""


def aborted(reply: Reply, dice: random.Random) -> None:
    """The server gave the request up."""
    reply["output_ids"] = reply["output_ids"][: len(reply["output_ids"]) // 2]
    reply["meta_info"]["completion_tokens"] = len(reply["output_ids"])
    reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in running queue"}


def outside_the_vocabulary(reply: Reply, dice: random.Random) -> None:
    """An output id that no tokenizer has."""
    reply["output_ids"][dice.randrange(len(reply["output_ids"]))] = 10_000_000


def negative(reply: Reply, dice: random.Random) -> None:
    """An output id below 0."""
    reply["output_ids"][dice.randrange(len(reply["output_ids"]))] = -1


def fewer_than_counted(reply: Reply, dice: random.Random) -> None:
    """Output ids that the count does not match."""
    reply["output_ids"] = reply["output_ids"][:-1]


def of_another_request(reply: Reply, dice: random.Random) -> None:
    """A reply that belongs to another request."""
    reply["meta_info"]["id"] = f"{dice.getrandbits(128):032x}"


def of_another_prompt(reply: Reply, dice: random.Random) -> None:
    """A reply to another prompt."""
    reply["meta_info"]["prompt_tokens"] += 1


REPLIES: dict[str, Callable[[Reply, random.Random], None]] = {
    "aborted": aborted,
    "id outside the vocabulary": outside_the_vocabulary,
    "negative id": negative,
    "fewer ids than counted": fewer_than_counted,
    "another request's reply": of_another_request,
    "another prompt's reply": of_another_prompt,
}


def rows_short(states: np.ndarray, dice: random.Random) -> np.ndarray:
    """The last row is missing."""
    return states[:-1]


def not_finite(states: np.ndarray, dice: random.Random) -> np.ndarray:
    """One value is no number."""
    states[dice.randrange(len(states)), 0, dice.randrange(states.shape[2])] = NAN
    return states


def all_zero(states: np.ndarray, dice: random.Random) -> np.ndarray:
    """One layer of one row is zero: rows that were never written."""
    states[dice.randrange(len(states)), dice.randrange(states.shape[1])] = 0
    return states


STATES: dict[str, Callable[[np.ndarray, random.Random], np.ndarray]] = {
    "rows short": rows_short,
    "NaN in the states": not_finite,
    "zeros in the states": all_zero,
}

FILES = ("damaged spool file", "missing spool file")
"""What happens to the spool file after the reply was made: its checksum tells, or its absence."""
BYTES = ("reset in mid-reply", "truncated", "duplicated", "status 500")
"""What happens to the bytes of the reply; the proxy does it."""
ALL = (*REPLIES, *STATES, *FILES, *BYTES)


def spoil(name: str, body: bytes, spool_dir: Path, dice: random.Random) -> bytes | None:
    """The reply spoiled in this way; None when it has nothing that can be spoiled so."""
    reply = json.loads(body)
    if name in REPLIES:
        REPLIES[name](reply, dice)
        return json.dumps(reply).encode()
    states = reply["meta_info"].get("eyas_states")
    if states is None:
        return None
    path = spool_dir / states["name"]
    if name == "missing spool file":
        path.unlink()
        return body
    if name == "damaged spool file":
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + 2 * dice.randrange(sum(states["shape"])))
            value = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([value[0] ^ 0x11]))
        return body
    tensor = np.fromfile(path, "<u2", offset=HEADER_BYTES).reshape(states["shape"])
    altered = STATES[name](tensor, dice)
    ref = Spool(spool_dir, states["node"], 1 << 40).write(states["name"], np.ascontiguousarray(altered))
    states["shape"], states["crc32"] = list(ref.shape), ref.crc32
    return json.dumps(reply).encode()
