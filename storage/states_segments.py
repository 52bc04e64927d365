"""The states of a store: one folder a capture, in it one sequence of segments a node.

Nodes do not wait for each other: two may store the same states, and whoever reads takes the
first. What is known to be stored is not written again.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.catalog import Catalog, PlacedIds
from storage.codec import Codec
from storage.columns import ids_array
from storage.files import checked_name
from storage.sample import States
from storage.segment import SegmentName, Staging, create_group, disk_errors
from storage.spool import Spool
from storage.states import SamplesLostError, alike, split_readable, stage_states


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesCommit:
    """What became of a batch of states; each of them is in exactly one of these."""

    stored: tuple[States, ...]
    lost: tuple[States, ...]
    """Gone from the spool or damaged there: to be captured again."""
    unfit: tuple[tuple[States, str], ...]
    """Of values that no forward pass gives, each with its code: to be captured again, and at last refused."""
    duplicate: tuple[States, ...]
    """Stored already, by whomever, or twice in the batch."""


class StatesSegments:
    """The folder `states/`; what its methods promise is said by those of `Store`."""

    def __init__(self, output: Path, codec: Codec, guard: Callable[[], None]) -> None:
        self._output = output
        self._codec = codec
        self._guard = guard
        self._lock = threading.RLock()
        self._stored: dict[str, PlacedIds] = {}

    def captures(self) -> tuple[str, ...]:
        """Names of the captures that were begun, sorted."""
        return tuple(sorted(path.parent.name for path in (self._output / "states").glob("*/zarr.json")))

    def known(self, capture: str, pairs: Sequence[tuple[bytes, bytes]]) -> NDArray[np.bool_]:
        """Which of these ids and digests have states, as of now."""
        with self._lock:
            return self._seen(capture).known(states_keys(pairs))

    def commit(self, batch: Sequence[States], spool: Spool) -> StatesCommit:
        """Commit those that are not stored, in one segment for all that are alike."""
        stored: list[States] = []
        lost: list[States] = []
        unfit: list[tuple[States, str]] = []
        duplicate: list[States] = []
        groups: dict[tuple[object, ...], list[States]] = {}
        for states in batch:
            groups.setdefault(alike(states), []).append(states)
        for group in groups.values():
            known = self.known(group[0].capture, [(states.id, states.digest) for states in group])
            fresh: dict[tuple[bytes, bytes], States] = {}
            for states, is_known in zip(group, known.tolist(), strict=True):
                key = (states.id, states.digest)
                if is_known or key in fresh:
                    duplicate.append(states)
                else:
                    fresh[key] = states
            readable, missing = split_readable(list(fresh.values()), spool)
            lost += missing
            while readable:
                try:
                    self._commit_alike(readable, spool)
                except SamplesLostError as error:
                    # Rows of theirs are in the staging folder already: all is written once more
                    # without any of them. A whole reading beforehand would cost every batch.
                    lost += error.lost
                    unfit += error.unfit
                    gone = {s.spool.name for s in (*error.lost, *(s for s, _ in error.unfit))}
                    readable = [states for states in readable if states.spool.name not in gone]
                else:
                    # Not there, when this node stood still for so long that the name it took was
                    # that of a segment merged and deleted meanwhile: hidden for ever.
                    pairs = [(states.id, states.digest) for states in readable]
                    found = self.known(group[0].capture, pairs).tolist()
                    stored += [states for states, there in zip(readable, found, strict=True) if there]
                    readable = [states for states, there in zip(readable, found, strict=True) if not there]
        return StatesCommit(
            stored=tuple(stored), lost=tuple(lost), unfit=tuple(unfit), duplicate=tuple(duplicate)
        )

    def _commit_alike(self, batch: Sequence[States], spool: Spool) -> None:
        capture = batch[0].capture
        folder = self._output / "states" / checked_name(capture, "capture")
        self._guard()
        with disk_errors(self._output):
            create_group(folder, {})
        with Staging(self._output, spool.node, self._codec, self._guard) as staging:
            with disk_errors(self._output):
                stage_states(staging, batch, spool)
            while True:
                # Another sink of this node may have taken the number meanwhile, and stored some of
                # the same. Readers take the first, so that is not worth writing a GB again.
                with self._lock:
                    last = self._seen(capture).catalog.last_seq(spool.node)
                if staging.commit(folder, SegmentName(node=spool.node, seq=last + 1)):
                    return

    def _seen(self, capture: str) -> PlacedIds:
        if capture not in self._stored:
            self._stored[capture] = PlacedIds(Catalog(self._output / "states" / capture), ("id", "digest"))
        self._stored[capture].refresh()
        return self._stored[capture]


def states_keys(pairs: Sequence[tuple[bytes, bytes]]) -> NDArray[np.uint8]:
    """Id and digest as one key, uint8 [N, 16]: hashes of different bytes, so their xor is as unique."""
    return ids_array([pair[0] for pair in pairs]) ^ ids_array([pair[1] for pair in pairs])
