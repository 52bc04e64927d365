"""The dead letters of a run that stand: one for each wanted prompt that has failed, with its source.

A response beats a failure to generate, states beat a failure to capture, and of several tries the
last one counts. Those that are asked for again are among them until they have another outcome.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from storage.dataset_index import DatasetIndex
from storage.failures import last_tries
from storage.idtable import ABSENT
from storage.index import Index
from storage.retries import asked_again
from storage.run import StatesMode
from storage.sample import Failure, Stage
from storage.settings import RunSettings
from storage.store import Store
from storage.wanted import wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One dead letter."""

    failure: Failure
    source_row: int
    """Row of the source that its prompt came from, from 0."""
    again: bool
    """Whether it is asked for again: it has no outcome yet."""
    capped: bool
    """Whether its dataset wants no more responses, having the tokens it may have."""


def standing(store: Store, settings: RunSettings) -> list[Standing]:
    """All of them, by dataset and source row. Raises `DamagedError` for a store that cannot be read."""
    capture = settings.capture.name if settings.capture and settings.states is not StatesMode.OFF else None
    index = Index(store, capture, settings.retries)
    index.refresh()
    by_dataset: dict[str, list[Failure]] = {}
    for failure in last_tries(store.failures()).values():
        by_dataset.setdefault(failure.dataset, []).append(failure)
    return [
        one
        for name in sorted(by_dataset.keys() & settings.datasets.keys() & set(index.datasets))
        for one in _of_dataset(store, settings, index.dataset(name), by_dataset[name], capture)
    ]


def _of_dataset(
    store: Store, settings: RunSettings, dataset: DatasetIndex, failures: list[Failure], capture: str | None
) -> Iterator[Standing]:
    place = {sample_id: at for at, sample_id in enumerate(dataset.ids)}
    caps = settings.datasets[dataset.name]
    most = caps.max_samples
    full = caps.max_tokens is not None and wanted(dataset, caps, settings.states).tokens >= caps.max_tokens
    rows = store.source_rows(dataset.name)
    found = []
    for failure in failures:
        at = place.get(failure.id)
        if at is not None and (most is None or at < most) and _stands(dataset, at, failure, capture):
            found.append((int(rows[at]), failure))
    for row, failure in sorted(found, key=lambda one: one[0]):
        yield Standing(
            failure=failure,
            source_row=row,
            again=asked_again(failure, settings.retries),
            capped=full and failure.stage is Stage.GENERATE,
        )


def _stands(dataset: DatasetIndex, at: int, failure: Failure, capture: str | None) -> bool:
    """Whether nothing stored has made it good."""
    if failure.stage is Stage.GENERATE:
        return bool(dataset.response_places[at] == ABSENT)
    return bool(
        failure.capture == capture
        and dataset.states_places[at] == ABSENT
        and np.array_equal(dataset.digest_rows[at], np.frombuffer(failure.digest or b"", np.uint8))
    )
