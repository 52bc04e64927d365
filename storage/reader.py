"""Reading samples for training: `storage.open(path)`. NumPy arrays out, nothing is written.

No file stays open and no thread is started, so that a loader may fork or pickle it at any time.
What was committed after opening is not in it: open again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from storage.catalog import placed
from storage.columns import ids_array, ids_list
from storage.errors import DamagedError, UsageError
from storage.idtable import ABSENT, IdTable
from storage.index import Index, Outcome
from storage.responses import ResponseColumns
from storage.run import Run
from storage.sample import Finish, Response, Span
from storage.segment import Segment
from storage.settings import read_settings
from storage.states import StatesColumns
from storage.store import Store
from storage.suggest import did_you_mean
from storage.tokens import Tokens

_RECENT = 32
"""Segments whose small columns are kept for the next sample."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of the training set; row t of the states belongs to token t."""

    id: bytes
    """The prompt's id, 16 bytes."""
    dataset: str
    tokens: Tokens
    """Prompt and response, int32 [T]; cut to the states' rows where these are fewer."""
    prompt_length: int
    """Tokens of the prompt: the response is `tokens[prompt_length:]`."""
    spans: tuple[Span, ...]
    """What the tokens are; none reaches past them."""
    states: NDArray[np.uint16] | None
    """bf16 bits, uint16 [T, L, H]: `torch.from_numpy(states).view(torch.bfloat16)`. None when no
    states were asked for."""
    finish: Finish
    text: str
    """The response for people; do not train on it."""


class Samples:
    """The samples that were complete when the store was opened.

    They are in the order of datasets (sorted by name) and prompts, whatever the order in which
    they were made.
    """

    run: Run
    capture: str | None
    """The folder under `states/`; None when the samples are responses alone."""

    def __init__(self, path: str | Path, capture: str | None = None) -> None:
        """Read the index; raises `UnavailableError` when the folder holds no run."""
        self._path = Path(path)
        store = Store.open(self._path)
        self.run = store.run
        self.capture = _known_capture(store, capture) if capture else _default_capture(store)
        index = Index(store, self.capture)
        index.refresh()
        least = (Outcome.STORED,) if self.capture else (Outcome.RESPONDED, Outcome.STORED)
        picked = [
            (dataset, np.flatnonzero(np.isin(dataset.outcome, least)))
            for dataset in map(index.dataset, index.datasets)
        ]
        self._ids = _joined([dataset.id_rows[at] for dataset, at in picked], np.empty((0, 16), np.uint8))
        self._positions = IdTable()
        self._positions.add(self._ids, np.arange(len(self._ids), dtype=np.int64))
        self._locate(index)
        self._start_caches()

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(index) for index in range(len(self)))

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index)

    @property
    def ids(self) -> list[bytes]:
        """Every sample's id, 16 bytes each."""
        return ids_list(self._ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """T of every sample, without reading one: int64 [N]."""
        return self._read(self._lengths)

    def _lengths(self) -> NDArray[np.int64]:
        segments, places = (
            (self._states_segments, self._states_places)
            if self.capture
            else (self._response_segments, self._response_places)
        )
        out = np.zeros(len(self), np.int64)
        numbers = places >> 32
        for number in np.unique(numbers):
            rows = np.flatnonzero(numbers == number)
            lengths = np.diff(segments[number].column("offset"))
            out[rows] = lengths[places[rows] & 0xFFFFFFFF]
        return out

    def __repr__(self) -> str:
        return f"Samples({str(self._path)!r}, {len(self)} samples, states {self.capture or 'off'})"

    def sample(self, key: int | bytes | str) -> Sample:
        """The sample with this index or id: 16 bytes, or their hex as logs and Flower show it.

        Raises `IndexError`, `KeyError`, and `DamagedError` when its files are not what they
        should be.
        """
        at = self._position(key)
        response = self._read(lambda: self._response(at))
        states = self._read(lambda: self._states(at)) if self.capture else None
        rows = len(response.tokens) if states is None else len(states)
        return Sample(
            id=response.id,
            dataset=response.dataset,
            tokens=response.tokens[:rows],
            prompt_length=response.prompt_length,
            spans=_cut(response.spans, rows),
            states=states,
            finish=response.finish,
            text=response.text,
        )

    def _position(self, key: int | bytes | str) -> int:
        if isinstance(key, str):
            try:
                key = bytes.fromhex(key)
            except ValueError:
                raise KeyError(key) from None
        if isinstance(key, bytes):
            found = int(self._positions.find(ids_array([key]))[0]) if len(key) == 16 else ABSENT
            if found == ABSENT:
                raise KeyError(key.hex())
            return found
        at = int(key) + (len(self) if key < 0 else 0)
        if not 0 <= at < len(self):
            raise IndexError(f"sample {key} of {len(self)}")
        return at

    def _response(self, at: int) -> Response:
        number, row = placed(int(self._response_places[at]))
        return self._response_columns(number).response(row)

    def _states(self, at: int) -> NDArray[np.uint16]:
        number, row = placed(int(self._states_places[at]))
        return self._states_columns(number).read(row)

    def _read(self, read: Callable[[], _T]) -> _T:
        """What `read` gives; again with a new index for as long as compactions move the sample."""
        missing = ""
        while True:
            try:
                return read()
            except FileNotFoundError as error:
                if str(error.filename) == missing:
                    raise DamagedError(f"`{missing}` is gone", code="file.missing") from None
                missing = str(error.filename)
            index = Index(Store.open(self._path), self.capture)
            index.refresh()
            self._locate(index)
            self._start_caches()

    def _locate(self, index: Index) -> None:
        """Take the places of our samples from an index."""
        datasets = [index.dataset(name) for name in index.datasets]
        table = IdTable()
        table.add(
            _joined([dataset.id_rows for dataset in datasets], self._ids[:0]),
            np.arange(sum(len(dataset) for dataset in datasets), dtype=np.int64),
        )
        rows = table.find(self._ids)
        none = np.empty(0, np.int64)
        self._response_places = _joined([dataset.response_places for dataset in datasets], none)[rows]
        self._states_places = _joined([dataset.states_places for dataset in datasets], none)[rows]
        self._response_segments: list[Segment] = index.responses.segments
        self._states_segments: list[Segment] = index.states.segments if index.states else []

    def _start_caches(self) -> None:
        responses, states = self._response_segments, self._states_segments
        self._response_columns = lru_cache(_RECENT)(lambda number: ResponseColumns(responses[number]))
        self._states_columns = lru_cache(_RECENT)(lambda number: StatesColumns(states[number]))

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the caches: a loader that starts its workers afresh pickles us."""
        return {name: value for name, value in vars(self).items() if not name.endswith("_columns")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_caches()


def _cut(spans: tuple[Span, ...], rows: int) -> tuple[Span, ...]:
    """The spans of the first `rows` tokens: none reaches past them."""
    return tuple(replace(span, end=min(span.end, rows)) for span in spans if span.start < rows)


def _known_capture(store: Store, name: str) -> str:
    """The name, when it was captured at all: an empty training set would say nothing."""
    known = store.captures()
    if name not in known:
        raise UsageError(
            f"`{store.path}` has no capture `{name}`",
            code="capture.missing",
            hint=did_you_mean(name, known, "captured"),
        )
    return name


def _default_capture(store: Store) -> str | None:
    """The run's own capture; for a run begun without one, that of its settings."""
    try:
        capture = read_settings(store.path).capture or store.run.spec.capture
    except FileNotFoundError:
        capture = store.run.spec.capture
    return capture.name if capture else None


def _joined(parts: list[NDArray[Any]], empty: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else empty
