"""Which rows of a folder need not be kept: states that are stored twice, failures made good.

What is found stays true: a response and its states, once stored, are stored for ever. Only of
the copies of one sample's states must one stay; where that lies is said as `relied`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from storage.catalog import Catalog, PlacedIds, place
from storage.failures import STAGES
from storage.idtable import IdTable
from storage.sample import Stage
from storage.segment import Segment

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Droppable:
    """What of a folder's visible segments may go."""

    kept: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Segment → rows that must stay, bool [N]; a segment that is not here stays whole."""
    relied: Mapping[str, Mapping[str, NDArray[np.bool_]]] = field(default_factory=dict)
    """Segment → other segments that hold what it may lose, and the rows there, bool [N]."""

    @property
    def counts(self) -> dict[str, int]:
        """Segment → rows that may go."""
        return {name: int(np.count_nonzero(~rows)) for name, rows in self.kept.items()}


def repeated_states(segments: Mapping[str, Segment], sizes: Mapping[str, int]) -> Droppable:
    """All but one of each sample's states; the biggest segment keeps its own, the others lose theirs.

    So what is dropped lies where it is cheap to write again.
    """
    names = sorted(segments, key=lambda name: -sizes[name])
    keys = [segments[name].ids("id") ^ segments[name].ids("digest") for name in names]
    if not keys:
        return Droppable()
    places = np.concatenate([place(at) + np.arange(len(k), dtype=np.int64) for at, k in enumerate(keys)])
    table, together = IdTable(), np.concatenate(keys)
    first = table.add(together, places)
    kept: dict[str, NDArray[np.bool_]] = {}
    relied: dict[str, dict[str, NDArray[np.bool_]]] = {}
    if first.all():
        return Droppable()
    held = table.find(together)
    for name, mine, where in zip(names, _split(first, keys), _split(held, keys), strict=True):
        if not mine.all():
            kept[name] = mine
            relied[name] = _rows(where[~mine], names, segments, name)
    return Droppable(kept=kept, relied=relied)


def _rows(
    places: NDArray[np.int64], names: Sequence[str], segments: Mapping[str, Segment], but: str
) -> dict[str, NDArray[np.bool_]]:
    """Where these places are: segment → its rows."""
    rows = {}
    for at in np.unique(places >> 32).tolist():
        if names[at] != but:
            rows[names[at]] = np.zeros(segments[names[at]].samples, bool)
            rows[names[at]][places[places >> 32 == at] & 0xFFFFFFFF] = True
    return rows


def failures_made_good(output: Path, segments: Mapping[str, Segment]) -> Droppable:
    """Failures to generate that have a response, and failures to capture that have their states."""
    if not segments:
        return Droppable()
    responses = PlacedIds(Catalog(output / "responses"), ("id",))
    responses.refresh()
    states: dict[str, PlacedIds] = {}
    kept = {}
    for name, segment in segments.items():
        ids, digests = segment.ids("id"), segment.ids("digest")
        captures = np.array(segment.attributes["captures"], object)[segment.column("capture")]
        at_capture = segment.column("stage") == STAGES.index(Stage.CAPTURE)
        good = ~at_capture & responses.known(ids)
        for capture in set(captures[at_capture].tolist()) - {""}:
            if capture not in states:
                states[capture] = PlacedIds(Catalog(output / "states" / capture), ("id", "digest"))
                states[capture].refresh()
            good |= at_capture & (captures == capture) & states[capture].known(ids ^ digests)
        if good.any():
            kept[name] = ~good
    return Droppable(kept=kept)


def _split(values: NDArray[_Scalar], like: list[NDArray[np.uint8]]) -> list[NDArray[_Scalar]]:
    return np.split(values, np.cumsum([len(one) for one in like])[:-1])
