"""What is stored, against the prompts: the one answer to "what is left to do".

Read from the arrays of ids alone, never the samples, and only from segments that are new since
the last look. `wanted.py` counts with it; `reader.py` finds samples by it.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from storage.catalog import Catalog, place
from storage.dataset_index import DatasetIndex, Outcome
from storage.errors import DamagedError
from storage.failures import STAGES, rows_asked_again
from storage.idtable import ABSENT, IdTable
from storage.retries import Retry
from storage.sample import Stage
from storage.segment import Segment
from storage.store import Store
from storage.wanted import Wanted, wanted

__all__ = ["DatasetIndex", "Index", "Outcome", "Wanted", "wanted"]

_POSITION_BITS = 40
_Rows = NDArray[np.uint8]


class Index:
    """A store's outcomes for one capture, or for responses alone. For one thread at a time."""

    def __init__(self, store: Store, capture: str | None, retries: tuple[Retry, ...] = ()) -> None:
        """Empty until `refresh`; `capture` names the folder under `states/`.

        Dead letters that `retries` ask for again count for nothing.
        """
        self.store = store
        self.capture = capture
        self.retries = retries
        self._forget()

    def _forget(self) -> None:
        path, capture = self.store.path, self.capture
        self.responses = Catalog(path / "responses")
        self.states = Catalog(path / "states" / capture) if capture else None
        self._failures = Catalog(path / "failures")
        self._prompts: dict[str, Catalog] = {}
        self._datasets: dict[str, DatasetIndex] = {}
        self._numbers: list[DatasetIndex] = []
        self._positions = IdTable()
        self._states_keys = IdTable()
        self._no_response = IdTable()
        self._no_states = IdTable()

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets that were begun, sorted."""
        return tuple(sorted(self._datasets))

    def dataset(self, name: str) -> DatasetIndex:
        """One dataset's prompts; raises `KeyError`."""
        return self._datasets[name]

    def refresh(self) -> bool:
        """Look at the segments that are new; whether there were any.

        After an error it is empty, and the next call reads everything: half of a look would be
        taken for the whole ever after. Raises `DamagedError`, and `OSError` for a disk's trouble.
        """
        missing = ""
        while True:
            try:
                return self._refresh()
            except FileNotFoundError as error:
                # A compaction has merged and deleted a segment while we read it: the next listing
                # has the merged one. What is gone for good is gone there too.
                self._forget()
                if str(error.filename) == missing:
                    raise DamagedError(
                        f"`{missing}` is gone",
                        code="file.missing",
                        hint="`storage verify` lists everything that is damaged",
                    ) from None
                missing = str(error.filename)
            except BaseException:
                self._forget()
                raise

    def _refresh(self) -> bool:
        # What is listed first was committed first: every response found here has its prompt here
        # too, since prompts are listed last.
        failures = [self._failures.segments[number] for number in self._failures.refresh()]
        states = self.states.refresh() if self.states else []
        responses = self.responses.refresh()
        grown = self._read_prompts()
        self._read_failures(failures)
        touched = [self._read_states(states), self._read_responses(responses)]
        touched += [segment.ids("id") for segment in failures]
        self._settle(np.concatenate(touched))
        return bool(grown or failures or states or responses)

    def _read_prompts(self) -> bool:
        ids: list[_Rows] = []
        positions: list[NDArray[np.int64]] = []
        for name in self.store.dataset_names():
            if name not in self._prompts:
                self._prompts[name] = Catalog(self.store.path / "prompts" / name)
                self._datasets[name] = DatasetIndex(name)
                self._numbers.append(self._datasets[name])
            catalog, dataset = self._prompts[name], self._datasets[name]
            number = self._numbers.index(dataset)
            segments = [catalog.segments[at] for at in catalog.refresh()]
            if not segments:
                continue
            new = np.concatenate([segment.ids("id") for segment in segments])
            lengths = np.concatenate([np.diff(segment.column("offset")) for segment in segments])
            ids.append(new)
            positions.append((number << _POSITION_BITS) + len(dataset) + np.arange(len(new), dtype=np.int64))
            dataset.extend(new, lengths.astype(np.int32))
        if ids:
            self._positions.add(np.concatenate(ids), np.concatenate(positions))
        return bool(ids)

    def _read_responses(self, numbers: list[int]) -> _Rows:
        """Enter new responses; the ids of their prompts."""
        columns = [_Columns(self.responses.segments[number], number) for number in numbers]
        if not columns:
            return _no_rows()
        ids = np.concatenate([column.ids for column in columns])
        digests = np.concatenate([column.digests for column in columns])
        places = np.concatenate([column.places for column in columns])
        tokens = np.concatenate([np.diff(column.segment.column("offset")) for column in columns])
        finish = np.concatenate([column.segment.column("finish") for column in columns])
        merged = np.concatenate([np.full(len(c.ids), bool(c.segment.replaces)) for c in columns])
        for dataset, at, rows in self._located(ids):
            # The first response to a prompt is the visible one; a merged segment only moves it.
            # Of values for one place NumPy keeps the last, so they are given last to first.
            take = (dataset.response_places[at] == ABSENT) | merged[rows]
            at, rows = at[take][::-1], rows[take][::-1]
            dataset.response_places[at] = places[rows]
            dataset.digest_rows[at] = digests[rows]
            dataset.sample_tokens[at] = tokens[rows]
            dataset.finish[at] = finish[rows]
        return ids

    def _read_states(self, numbers: list[int]) -> _Rows:
        """Enter new states; the ids of their prompts."""
        assert self.states is not None or not numbers
        columns = [_Columns(self.states.segments[number], number) for number in numbers if self.states]
        if not columns:
            return _no_rows()
        ids = np.concatenate([column.ids for column in columns])
        keys = ids ^ np.concatenate([column.digests for column in columns])
        places = np.concatenate([column.places for column in columns])
        new = self._states_keys.add(keys, places)
        merged = np.concatenate([np.full(len(c.ids), bool(c.segment.replaces)) for c in columns])
        self._states_keys.replace(keys[merged & ~new], places[merged & ~new])
        return ids

    def _read_failures(self, segments: list[Segment]) -> None:
        for segment in segments:
            ids, digests = segment.ids("id"), segment.ids("digest")
            dead = ~rows_asked_again(segment, self.retries)
            at_capture = segment.column("stage") == STAGES.index(Stage.CAPTURE)
            captures = np.array(segment.attributes["captures"])[segment.column("capture")]
            mine = dead & at_capture & (captures == (self.capture or ""))
            rows = np.zeros(len(ids), np.int64)
            self._no_response.add(ids[dead & ~at_capture], rows[dead & ~at_capture])
            self._no_states.add((ids ^ digests)[mine], rows[mine])

    def _settle(self, ids: _Rows) -> None:
        """Work out again the outcome of these prompts."""
        # A first look touches every prompt, most of them twice: then none has to be looked up.
        all_of_them = [(dataset, np.arange(len(dataset)), ids) for dataset in self._numbers]
        for dataset, at, _ in all_of_them if len(ids) >= len(self._positions) else self._located(ids):
            keys = dataset.id_rows[at] ^ dataset.digest_rows[at]
            responded = dataset.response_places[at] != ABSENT
            states = np.where(responded, self._states_keys.find(keys), ABSENT)
            dataset.states_places[at] = states
            unanswered = ~responded & (self._no_response.find(dataset.id_rows[at]) != ABSENT)
            uncaptured = responded & (self._no_states.find(keys) != ABSENT)
            dataset.outcome[at] = np.select(
                [states != ABSENT, unanswered | uncaptured, responded],
                [Outcome.STORED, Outcome.DEAD, Outcome.RESPONDED],
                Outcome.NONE,
            )

    def _located(self, ids: _Rows) -> Iterator[tuple[DatasetIndex, NDArray[np.int64], NDArray[np.int64]]]:
        """For each dataset that has some of these ids: positions there, and rows of `ids`."""
        found = self._positions.find(ids)
        numbers = found >> _POSITION_BITS
        for number, dataset in enumerate(self._numbers):
            rows = np.flatnonzero(numbers == number)
            if len(rows):
                yield dataset, found[rows] & ((1 << _POSITION_BITS) - 1), rows


class _Columns:
    """The columns that responses and states share."""

    def __init__(self, segment: Segment, number: int) -> None:
        self.segment = segment
        self.ids: _Rows = segment.ids("id")
        self.digests: _Rows = segment.ids("digest")
        self.places = place(number) + np.arange(len(self.ids), dtype=np.int64)


def _no_rows() -> _Rows:
    return np.empty((0, 16), np.uint8)
