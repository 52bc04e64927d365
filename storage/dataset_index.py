"""What is known of one dataset's prompts, as arrays in the prompts' order. Reads no files."""

from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from storage.catalog import placed
from storage.columns import ids_list
from storage.idtable import ABSENT
from storage.sample import Finish
from storage.tokens import ID_BYTES


class Outcome(IntEnum):
    """How far a prompt has come; later ones beat earlier ones, except that DEAD yields to both."""

    NONE = 0
    RESPONDED = 1
    """A response, and no states of it."""
    STORED = 2
    """A response, and the states of that very response for the index's capture."""
    DEAD = 3
    """A dead letter: no response could be had, or no states of the response there is."""


class DatasetIndex:
    """One dataset's prompts and their outcomes; arrays of N prompts, replaced as they grow."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.id_rows: NDArray[np.uint8] = np.empty((0, ID_BYTES), np.uint8)
        """The prompts' ids, uint8 [N, 16]."""
        self.prompt_tokens: NDArray[np.int32] = np.empty(0, np.int32)
        """Tokens of each prompt."""
        self.outcome: NDArray[np.uint8] = np.empty(0, np.uint8)
        """An `Outcome` for each prompt."""
        self.sample_tokens: NDArray[np.int32] = np.empty(0, np.int32)
        """Tokens of prompt and response, 0 before there is a response."""
        self.finish: NDArray[np.uint8] = np.empty(0, np.uint8)
        """Place in `responses.FINISHES`, 255 before there is a response."""
        self.digest_rows: NDArray[np.uint8] = np.empty((0, ID_BYTES), np.uint8)
        """Digest of the visible response, uint8 [N, 16]; zeros before there is one."""
        self.response_places: NDArray[np.int64] = np.empty(0, np.int64)
        """`catalog.place` of the response, -1 without one."""
        self.states_places: NDArray[np.int64] = np.empty(0, np.int64)
        """`catalog.place` of its states, -1 without any."""
        self._ids: list[bytes] = []

    def __len__(self) -> int:
        return len(self.outcome)

    @property
    def ids(self) -> list[bytes]:
        """The prompts' ids, in order."""
        if len(self._ids) < len(self.id_rows):
            self._ids += ids_list(self.id_rows[len(self._ids) :])
        return self._ids

    @property
    def truncated(self) -> int:
        """Responses that ended at their length limit."""
        return int(np.count_nonzero(self.finish == tuple(Finish).index(Finish.LENGTH)))

    def count(self, outcome: Outcome) -> int:
        """How many prompts have this outcome."""
        return int(np.count_nonzero(self.outcome == outcome))

    def states_at(self, position: int) -> tuple[int, int] | None:
        """Segment number and row of the states, or None."""
        at = int(self.states_places[position])
        return None if at == ABSENT else placed(at)

    def extend(self, ids: NDArray[np.uint8], prompt_tokens: NDArray[np.int32]) -> None:
        """Append prompts, with no outcome yet."""
        count = len(ids)
        self.id_rows = np.concatenate([self.id_rows, ids])
        self.prompt_tokens = np.concatenate([self.prompt_tokens, prompt_tokens])
        self.outcome = _grown(self.outcome, count, Outcome.NONE)
        self.sample_tokens = _grown(self.sample_tokens, count, 0)
        self.finish = _grown(self.finish, count, 255)
        self.digest_rows = np.concatenate([self.digest_rows, np.zeros((count, ID_BYTES), np.uint8)])
        self.response_places = _grown(self.response_places, count, ABSENT)
        self.states_places = _grown(self.states_places, count, ABSENT)


_Number = TypeVar("_Number", bound=np.integer[Any])


def _grown(array: NDArray[_Number], count: int, value: int) -> NDArray[_Number]:
    return np.concatenate([array, np.full(count, value, array.dtype)])
