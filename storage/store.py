"""The store's writing side: one output folder, to which segments are committed.

What lies in a segment is said by `prompts.py`, `responses.py`, `states.py` and `failures.py`, how
it is committed by `segment.py`; reading for training is `reader.py`. No method here waits for
anything but the disk, and each may be killed at any point: what it has not committed is in
`.staging` and counts for nothing.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from storage.catalog import Catalog, place, placed
from storage.codec import Codec, chosen_codec
from storage.columns import ids_array
from storage.errors import UnavailableError, UnsuitableError
from storage.failures import read_failures, stage_failures
from storage.files import checked_name, create_json, read_json
from storage.idtable import ABSENT, IdTable
from storage.prompts import read_prompts, stage_prompts
from storage.responses import ResponseColumns, stage_responses
from storage.run import FORMAT, DatasetSpec, Run, RunSpec, create_or_check_run, differences, read_run
from storage.sample import Failure, Prompt, Response, Stage, States
from storage.segment import SegmentName, Staging, disk_errors, sweep_staging
from storage.spool import Spool
from storage.states import SampleLostError, alike, stage_states
from storage.tokens import ID_BYTES

_T = TypeVar("_T", Response, Failure)
_RECENT = 8
"""Segments of responses whose small columns are kept for the next look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingState:
    """How far a dataset's source has been read."""

    count: int
    """Prompts stored."""
    next_row: int
    """Source row to go on from."""
    complete: bool
    """Whether the source has no more rows."""
    dropped: Mapping[str, int]
    """Reason → rows that gave no prompt, over all segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesCommit:
    """What became of a batch of states; every one of them is in exactly one of these."""

    stored: tuple[States, ...]
    lost: tuple[States, ...]
    """Gone from the spool or damaged there: to be captured again."""
    duplicate: tuple[States, ...]
    """Stored already, by whomever."""


class Store:
    """One output folder. Its methods may be called from several threads.

    Methods that write raise `FullError` when the disk has no room and `UnavailableError` when it
    cannot be written; nothing was committed then.
    """

    def __init__(self, path: Path, run: Run, codec: Codec | None = None) -> None:
        """For `create` and `open`; `codec` is what this process writes with, else `EYAS_STORE_CODEC`."""
        self.path = path
        self.run = run
        self.codec = codec or chosen_codec()
        self._lock = threading.RLock()
        self._prompts: dict[str, Catalog] = {}
        self._responses = Catalog(path / "responses")
        self._response_places = IdTable()
        self._response_columns = lru_cache(_RECENT)(
            lambda number: ResponseColumns(self._responses.segments[number])
        )
        self._states: dict[str, tuple[Catalog, IdTable]] = {}
        self._failures = Catalog(path / "failures")
        self._failure_keys: set[tuple[object, ...]] = set()

    @classmethod
    def create(cls, path: Path, spec: RunSpec, codec: Codec | None = None) -> "Store":
        """The store of this run, made now if the folder holds none.

        Raises `UnsuitableError` naming each difference when the folder holds another run.
        """
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            run = create_or_check_run(path, spec)
            _create_group(path, {"eyas": FORMAT})
            for name in ("prompts", "responses", "states", "failures"):
                _create_group(path / name, {})
            for name in ("facts", ".staging"):
                (path / name).mkdir(exist_ok=True)
        return cls(path, run, codec)

    @classmethod
    def open(cls, path: Path, codec: Codec | None = None) -> "Store":
        """The store in this folder, which is not written to; raises `UnavailableError`."""
        run = read_run(path)
        if run is None:
            raise UnavailableError(
                f"there is no run in `{path}`",
                code="run.missing",
                hint="give the folder that `producer enqueue --output-dir` was given, or set EYAS_OUTPUT_DIR",
            )
        return cls(path, run, codec)

    # Prompts

    def dataset_names(self) -> tuple[str, ...]:
        """The datasets that were begun, sorted."""
        found = (self.path / "prompts").glob("*/zarr.json")
        return tuple(sorted(path.parent.name for path in found))

    def dataset_spec(self, name: str) -> DatasetSpec | None:
        """What the dataset was begun with, or None when it was not."""
        try:
            content = read_json(self.path / "prompts" / checked_name(name, "dataset") / "zarr.json")
        except FileNotFoundError:
            return None
        return DatasetSpec.from_json(content["attributes"])

    def begin_dataset(self, spec: DatasetSpec) -> None:
        """Add a dataset to the run; nothing happens when it is there already.

        Raises `UnsuitableError` naming each difference when it was begun with another spec.
        """
        folder = self.path / "prompts" / checked_name(spec.name, "dataset")
        with disk_errors(self.path):
            _create_group(folder, {**spec.to_json(), "fingerprint": spec.fingerprint})
        stored = self.dataset_spec(spec.name)
        if stored is None or stored.fingerprint != spec.fingerprint:
            found = differences(stored.to_json() if stored else {}, spec.to_json())
            raise UnsuitableError(
                f"dataset `{spec.name}` was begun with another source: {'; '.join(found)}",
                code="dataset.other",
                hint="give it another `name` in the manifest, or choose another folder with `--output-dir`",
            )

    def reading_state(self, dataset: str) -> ReadingState:
        """How far this dataset has been read."""
        with self._lock:
            segments = self._prompt_catalog(dataset).visible()
        dropped: dict[str, int] = {}
        for segment in segments:
            for reason, count in segment.attributes["dropped"].items():
                dropped[reason] = dropped.get(reason, 0) + count
        return ReadingState(
            count=sum(segment.samples for segment in segments),
            next_row=segments[-1].attributes["next_row"] if segments else 0,
            complete=bool(segments) and segments[-1].attributes["complete"],
            dropped=dropped,
        )

    def add_prompts(
        self,
        dataset: str,
        prompts: Sequence[Prompt],
        *,
        next_row: int,
        complete: bool,
        dropped: Mapping[str, int],
    ) -> None:
        """Append prompts, in one segment, behind those this object has seen.

        `dropped` counts the rows since the last call. Raises `UnavailableError` when somebody
        else has appended since `reading_state`: two readers of one source would store it twice.
        """
        with self._lock:
            catalog = self._prompts.get(dataset) or self._prompt_catalog(dataset)
            name = SegmentName(node=None, seq=catalog.last_seq() + 1)
            with Staging(self.path, "prompts", self.codec) as staging:
                stage_prompts(staging, prompts, next_row=next_row, complete=complete, dropped=dropped)
                if not staging.commit(catalog.parent, name):
                    raise UnavailableError(
                        f"another `producer enqueue` is reading dataset `{dataset}`",
                        code="dataset.busy",
                        hint="let it end, then run this one again",
                    )
            catalog.refresh()

    def prompts(self, dataset: str, start: int = 0, stop: int | None = None) -> Iterator[Prompt]:
        """The dataset's prompts `[start, stop)` in order, decoded a few hundred at a time."""
        with self._lock:
            segments = self._prompt_catalog(dataset).visible()
        first = 0
        for segment in segments:
            last = first + segment.samples
            begin, end = max(start, first), last if stop is None else min(stop, last)
            if begin < end:
                yield from read_prompts(segment, dataset, begin - first, end - first)
            first = last

    def prompt(self, dataset: str, position: int) -> Prompt:
        """The dataset's prompt at this position; raises `IndexError`."""
        for prompt in self.prompts(dataset, position, position + 1):
            return prompt
        raise IndexError(f"dataset `{dataset}` has no prompt `{position}`")

    # Responses and dead letters: one sequence of segments for all nodes

    def response(self, sample_id: bytes) -> Response:
        """The visible response to this prompt; raises `KeyError` when there is none."""
        with self._lock:
            key = ids_array([sample_id])
            if (found := int(self._response_places.find(key)[0])) == ABSENT:
                self._see_responses()
                found = int(self._response_places.find(key)[0])
            if found == ABSENT:
                raise KeyError(sample_id.hex())
            number, row = placed(found)
            return self._response_columns(number).response(row)

    def commit_responses(self, batch: Sequence[Response]) -> int:
        """Commit those whose prompt has no response yet; how many that were."""
        return self._commit_shared(batch, self._responses, self._new_responses, stage_responses)

    def failures(self) -> Iterator[Failure]:
        """All dead letters, those too that a response or states have since made good."""
        with self._lock:
            self._failures.refresh()
            segments = self._failures.visible()
        for segment in segments:
            yield from read_failures(segment)

    def commit_failures(self, batch: Sequence[Failure]) -> int:
        """Commit those that nothing stored has made good and that are not there yet; how many."""
        return self._commit_shared(batch, self._failures, self._new_failures, stage_failures)

    def _commit_shared(
        self,
        batch: Sequence[_T],
        catalog: Catalog,
        still_new: Callable[[Sequence[_T]], list[_T]],
        stage: Callable[[Staging, Sequence[_T]], None],
    ) -> int:
        """Commit what is new under the next number.

        `still_new` looks at every segment there is, and the rename succeeds only onto the number
        behind the last one it saw, so between the look and the commit nobody else committed.
        The loser looks again and drops what the winner stored.
        """
        with self._lock:
            while new := still_new(batch):
                name = SegmentName(node=None, seq=catalog.last_seq() + 1)
                with Staging(self.path, catalog.parent.name, self.codec) as staging:
                    stage(staging, new)
                    if staging.commit(catalog.parent, name):
                        return len(new)
            return 0

    def _new_responses(self, batch: Sequence[Response]) -> list[Response]:
        self._see_responses()
        first = {response.id: response for response in reversed(batch)}
        unique = [first[key] for key in dict.fromkeys(response.id for response in batch)]
        found = self._response_places.find(ids_array([response.id for response in unique]))
        return [response for response, at in zip(unique, found, strict=True) if at == ABSENT]

    def _new_failures(self, batch: Sequence[Failure]) -> list[Failure]:
        for number in self._failures.refresh():
            self._failure_keys.update(_failure_key(f) for f in read_failures(self._failures.segments[number]))
        self._see_responses()
        new = {_failure_key(failure): failure for failure in reversed(batch)}
        return [
            new[key]
            for key in dict.fromkeys(_failure_key(failure) for failure in batch)
            if key not in self._failure_keys and not self._made_good(new[key])
        ]

    def _made_good(self, failure: Failure) -> bool:
        if failure.stage is Stage.GENERATE or failure.digest is None or failure.capture is None:
            return bool(self._response_places.find(ids_array([failure.id]))[0] != ABSENT)
        places = self._see_states(failure.capture)[1]
        return bool(places.find(_states_keys([(failure.id, failure.digest)]))[0] != ABSENT)

    def _see_responses(self) -> None:
        for number in self._responses.refresh():
            ids = self._responses.segments[number].column("id")
            _enter(self._response_places, ids, number, self._responses)

    # States: each node its own sequence of segments

    def captures(self) -> tuple[str, ...]:
        """Names of the captures of which states are stored, sorted."""
        return tuple(sorted(path.parent.name for path in (self.path / "states").glob("*/zarr.json")))

    def commit_states(self, batch: Sequence[States], spool: Spool) -> StatesCommit:
        """Commit what is in this node's spool; the files there stay.

        Samples with unlike layers or shapes go into segments of their own. When the spool has
        lost one, its segment is written again without it: rare, and dearer only then.
        """
        stored: list[States] = []
        lost: list[States] = []
        duplicate: list[States] = []
        with self._lock:
            groups: dict[tuple[object, ...], list[States]] = {}
            for states in batch:
                groups.setdefault(alike(states), []).append(states)
            for group in groups.values():
                fresh = self._new_states(group)
                duplicate += [states for states in group if not any(states is other for other in fresh)]
                while fresh:
                    try:
                        self._commit_alike(fresh, spool)
                        stored += fresh
                        break
                    except SampleLostError as error:
                        lost.append(error.states)
                        fresh = [states for states in fresh if states is not error.states]
        return StatesCommit(stored=tuple(stored), lost=tuple(lost), duplicate=tuple(duplicate))

    def _commit_alike(self, batch: Sequence[States], spool: Spool) -> None:
        capture = batch[0].capture
        folder = self.path / "states" / checked_name(capture, "capture")
        with disk_errors(self.path):
            _create_group(folder, {})
        with Staging(self.path, spool.node, self.codec) as staging:
            with disk_errors(self.path):
                stage_states(staging, batch, spool)
            while True:
                # Another sink of this node may have taken the number. What it stored may be in
                # here too; readers take the first, so that is not worth writing a GB again.
                catalog, _ = self._see_states(capture)
                name = SegmentName(node=spool.node, seq=catalog.last_seq(spool.node) + 1)
                if staging.commit(folder, name):
                    return

    def _new_states(self, group: Sequence[States]) -> list[States]:
        places = self._see_states(group[0].capture)[1]
        found = places.find(_states_keys([(states.id, states.digest) for states in group]))
        new: dict[tuple[bytes, bytes], States] = {}
        for states, at in zip(group, found, strict=True):
            if at == ABSENT:
                new.setdefault((states.id, states.digest), states)
        return list(new.values())

    def _see_states(self, capture: str) -> tuple[Catalog, IdTable]:
        if capture not in self._states:
            self._states[capture] = (Catalog(self.path / "states" / capture), IdTable())
        catalog, places = self._states[capture]
        for number in catalog.refresh():
            segment = catalog.segments[number]
            _enter(places, segment.column("id") ^ segment.column("digest"), number, catalog)
        return catalog, places

    # The rest

    def write_facts(self, facts_id: str, facts: Mapping[str, Any]) -> None:
        """Keep what a server said of itself; nothing happens when it is kept already."""
        with disk_errors(self.path):
            create_json(self.path / "facts" / f"{checked_name(facts_id, 'facts id')}.json", facts)

    def sweep_staging(self, older_than_s: float) -> int:
        """Remove what killed writers left and nobody touched for so long; how many folders."""
        return sweep_staging(self.path, older_than_s)

    def _prompt_catalog(self, dataset: str) -> Catalog:
        if dataset not in self._prompts:
            self._prompts[dataset] = Catalog(self.path / "prompts" / checked_name(dataset, "dataset"))
        self._prompts[dataset].refresh()
        return self._prompts[dataset]


def _create_group(folder: Path, attributes: Mapping[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    if not (folder / "zarr.json").exists():
        content = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
        create_json(folder / "zarr.json", content)


def _enter(table: IdTable, keys: np.ndarray[Any, Any], number: int, catalog: Catalog) -> None:
    """Enter a segment's rows; a merged segment takes over the places of those it replaces."""
    places = place(number) + np.arange(len(keys), dtype=np.int64)
    table.add(keys, places)
    if catalog.segments[number].replaces:
        table.replace(keys, places)


def _states_keys(pairs: Sequence[tuple[bytes, bytes]]) -> np.ndarray[Any, Any]:
    """Id and digest as one key: both are hashes of different bytes, so their xor is as unique."""
    return ids_array([pair[0] for pair in pairs]) ^ ids_array([pair[1] for pair in pairs])


def _failure_key(failure: Failure) -> tuple[object, ...]:
    return (failure.id, failure.digest or bytes(ID_BYTES), failure.capture, failure.stage)
