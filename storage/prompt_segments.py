"""The prompts of a store: datasets begun, read step by step, and given back in order.

Each dataset has a folder under `prompts/` with a sequence of segments of its own and, in theory,
one reader of its source at a time; the commit finds out when there are two.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.catalog import Catalog
from storage.codec import Codec
from storage.columns import ids_list
from storage.errors import UnavailableError, UnsuitableError
from storage.files import checked_name, read_json
from storage.prompts import read_prompts, stage_prompts
from storage.run import DatasetSpec, differences
from storage.sample import Prompt
from storage.segment import Segment, SegmentName, Staging, create_group, disk_errors


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


class PromptSegments:
    """The folder `prompts/`; what its methods promise is said by those of `Store`."""

    def __init__(self, output: Path, codec: Codec, guard: Callable[[], None]) -> None:
        self._output = output
        self._codec = codec
        self._guard = guard
        self._lock = threading.RLock()
        self._catalogs: dict[str, Catalog] = {}

    def dataset_names(self) -> tuple[str, ...]:
        """The datasets that were begun, sorted."""
        found = (self._output / "prompts").glob("*/zarr.json")
        return tuple(sorted(path.parent.name for path in found))

    def dataset_spec(self, name: str) -> DatasetSpec | None:
        """What the dataset was begun with, or None when it was not."""
        try:
            content = read_json(self._folder(name) / "zarr.json")
        except FileNotFoundError:
            return None
        return DatasetSpec.from_json(content["attributes"])

    def begin_dataset(self, spec: DatasetSpec) -> None:
        """Create the dataset's group, or check that it is this one's."""
        self._guard()
        with disk_errors(self._output):
            create_group(self._folder(spec.name), {**spec.to_json(), "fingerprint": spec.fingerprint})
        stored = self.dataset_spec(spec.name)
        if stored is None or stored.fingerprint != spec.fingerprint:
            found = differences(stored.to_json() if stored else {}, spec.to_json())
            raise UnsuitableError(
                f"dataset `{spec.name}` was begun with another source: {'; '.join(found)}",
                code="dataset.other",
                hint="give it another `name` in the manifest, or choose another folder with `--output-dir`",
            )

    def reading_state(self, dataset: str) -> ReadingState:
        """How far this dataset has been read, by anybody."""
        segments = self._seen(dataset)
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

    def add(
        self,
        dataset: str,
        prompts: Sequence[Prompt],
        *,
        next_row: int,
        complete: bool,
        dropped: Mapping[str, int],
    ) -> None:
        """Commit one segment behind those this object has seen.

        The number it takes is the one behind the last look, not behind a fresh listing: what the
        caller is about to add goes on from the rows it saw, and would repeat anything added since.
        """
        with self._lock:
            if dataset not in self._catalogs:
                self._seen(dataset)
            catalog = self._catalogs[dataset]
            name = SegmentName(node=None, seq=catalog.last_seq() + 1)
        with Staging(self._output, "prompts", self._codec, self._guard) as staging:
            stage_prompts(staging, prompts, next_row=next_row, complete=complete, dropped=dropped)
            if not staging.commit(catalog.parent, name):
                raise UnavailableError(
                    f"another `producer enqueue` is reading dataset `{dataset}`",
                    code="dataset.busy",
                    hint="let it end, then run this one again",
                )
        self._seen(dataset)

    def prompts(self, dataset: str, start: int, stop: int | None) -> Iterator[Prompt]:
        """Prompts `[start, stop)` in order; a segment's ids in memory, its tokens block by block."""
        first = 0
        for segment in self._seen(dataset):
            last = first + segment.samples
            begin, end = max(start, first), last if stop is None else min(stop, last)
            if begin < end:
                yield from read_prompts(segment, dataset, begin - first, end - first)
            first = last

    def ids(self, dataset: str) -> Iterator[bytes]:
        """The prompts' ids in order, a segment's at a time; their tokens are not read."""
        for segment in self._seen(dataset):
            yield from ids_list(segment.ids("id"))

    def source_rows(self, dataset: str) -> NDArray[np.int64]:
        """The source's row of each prompt, int64 [N]."""
        columns = [segment.column("source_row") for segment in self._seen(dataset)]
        return np.concatenate(columns) if columns else np.empty(0, np.int64)

    def tokens(self, dataset: str) -> int:
        """Tokens of all prompts together, from their offsets."""
        return sum(int(segment.column("offset")[-1]) for segment in self._seen(dataset))

    def _seen(self, dataset: str) -> list[Segment]:
        """The dataset's segments in order, as of now."""
        with self._lock:
            if dataset not in self._catalogs:
                self._catalogs[dataset] = Catalog(self._folder(dataset))
            self._catalogs[dataset].refresh()
            return self._catalogs[dataset].visible()

    def _folder(self, dataset: str) -> Path:
        return self._output / "prompts" / checked_name(dataset, "dataset")
