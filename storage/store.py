"""The store's writing side: one output folder, to which segments are committed.

The front of `prompt_segments.py`, `shared_segments.py` (responses, dead letters) and
`states_segments.py`; how a segment is committed is in `segment.py`, reading for training in
`reader.py`. No method here waits for anything but the disk, and each may be killed at any point:
what it has not committed lies in `.staging` and counts for nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.codec import Codec, chosen_codec
from storage.errors import UnavailableError
from storage.files import checked_name, create_json
from storage.prompt_segments import PromptSegments, ReadingState
from storage.replaced import KEPT_S, Deleted, delete_replaced
from storage.run import FORMAT, DatasetSpec, Run, RunSpec, check_run, create_or_check_run, read_run
from storage.sample import Failure, Prompt, Response, States
from storage.segment import STAGING, create_group, disk_errors, sweep_staging
from storage.shared_segments import SharedSegments
from storage.spool import Spool
from storage.states_segments import StatesCommit, StatesSegments

__all__ = ["ReadingState", "StatesCommit", "Store"]


class Store:
    """One output folder. Its methods may be called from several threads.

    Methods that write raise `FullError` when the disk has no room, `UnavailableError` when it cannot
    be written and `RunReplacedError` when the folder holds another run now; nothing was committed
    then. All that read or write raise `DamagedError`
    when a segment they need is not what it should be.
    """

    def __init__(self, path: Path, run: Run, codec: Codec | None = None) -> None:
        """For `create` and `open`; `codec` is what this process writes with, else `EYAS_STORE_CODEC`."""
        self.path = path
        self.run = run
        self.codec = codec or chosen_codec()
        self._prompts = PromptSegments(path, self.codec, self.check_run)
        self._states = StatesSegments(path, self.codec, self.check_run)
        self._shared = SharedSegments(path, self.codec, self._states, self.check_run)

    @classmethod
    def create(cls, path: Path, spec: RunSpec, codec: Codec | None = None) -> "Store":
        """The store of this run, made now if the folder holds none.

        Raises `UnsuitableError` naming each difference when the folder holds another run.
        """
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            run = create_or_check_run(path, spec)
            create_group(path, {"eyas": FORMAT})
            for name in ("prompts", "responses", "states", "failures"):
                create_group(path / name, {})
            for name in ("facts", STAGING):
                (path / name).mkdir(exist_ok=True)
        return cls(path, run, codec)

    @classmethod
    def open(cls, path: Path, codec: Codec | None = None) -> "Store":
        """The store in this folder, which is not written to; raises `UnavailableError`."""
        try:
            run = read_run(path)
        except OSError as error:
            raise UnavailableError(
                f"`{path}` cannot be read: {error.strerror}",
                code="output.unreadable",
                hint="give the folder of a run, and this user the right to read it",
            ) from error
        if run is None:
            raise UnavailableError(
                f"there is no run in `{path}`",
                code="run.missing",
                hint="give the folder that `producer enqueue --output-dir` was given, or set EYAS_OUTPUT_DIR",
            )
        return cls(path, run, codec)

    def check_run(self) -> None:
        """Whether the folder still holds this run; every commit asks.

        Raises `RunReplacedError` when another was begun there, `UnavailableError` when none is there.
        """
        check_run(self.path, self.run)

    def dataset_names(self) -> tuple[str, ...]:
        """The datasets that were begun, sorted."""
        return self._prompts.dataset_names()

    def dataset_spec(self, name: str) -> DatasetSpec | None:
        """What the dataset was begun with, or None when it was not."""
        return self._prompts.dataset_spec(name)

    def begin_dataset(self, spec: DatasetSpec) -> None:
        """Add a dataset to the run; nothing happens when it is there already.

        Raises `UnsuitableError` naming each difference when it was begun with another spec.
        """
        self._prompts.begin_dataset(spec)

    def reading_state(self, dataset: str) -> ReadingState:
        """How far this dataset has been read, by anybody."""
        return self._prompts.reading_state(dataset)

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

        `dropped` counts the rows dropped since the last call. Raises `UnavailableError` when
        somebody else has appended since `reading_state`: two readers of one source would store
        its rows twice.
        """
        self._prompts.add(dataset, prompts, next_row=next_row, complete=complete, dropped=dropped)

    def prompts(self, dataset: str, start: int = 0, stop: int | None = None) -> Iterator[Prompt]:
        """The dataset's prompts `[start, stop)` in order, decoded a few hundred at a time."""
        return self._prompts.prompts(dataset, start, stop)

    def prompt_ids(self, dataset: str) -> Iterator[bytes]:
        """The ids of the dataset's prompts in order, without reading their tokens."""
        return self._prompts.ids(dataset)

    def source_rows(self, dataset: str) -> NDArray[np.int64]:
        """The row of its source that each of the dataset's prompts came from, in order, int64 [N]."""
        return self._prompts.source_rows(dataset)

    def prompt_tokens(self, dataset: str) -> int:
        """Tokens of the dataset's prompts together, without reading them."""
        return self._prompts.tokens(dataset)

    def prompt(self, dataset: str, position: int) -> Prompt:
        """The dataset's prompt at this position; raises `IndexError`."""
        for prompt in self.prompts(dataset, position, position + 1):
            return prompt
        raise IndexError(f"dataset `{dataset}` has no prompt `{position}`")

    def response(self, sample_id: bytes) -> Response:
        """The visible response to this prompt; raises `KeyError` when there is none."""
        found = self._shared.response(sample_id)
        if found is None:
            raise KeyError(sample_id.hex())
        return found

    def known_responses(self, sample_ids: Sequence[bytes]) -> list[bool]:
        """Which of these prompts have a response, as of now."""
        return self._shared.known_responses(sample_ids)

    def known_states(self, capture: str, pairs: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Which of these ids and digests have states of this capture."""
        known: list[bool] = self._states.known(capture, pairs).tolist()
        return known

    def commit_responses(self, batch: Sequence[Response]) -> int:
        """Commit those whose prompt has no response yet; how many that were.

        The others are dropped: a response is visible once, and the first stays.
        """
        return self._shared.commit_responses(batch)

    def failures(self) -> Iterator[Failure]:
        """All dead letters, those too that a response or states have since made good."""
        return self._shared.failures()

    def commit_failures(self, batch: Sequence[Failure]) -> int:
        """Commit those that are not there yet and that nothing stored has made good; how many."""
        return self._shared.commit_failures(batch)

    def captures(self) -> tuple[str, ...]:
        """Names of the captures of which states are stored, sorted."""
        return self._states.captures()

    def commit_states(self, batch: Sequence[States], spool: Spool) -> StatesCommit:
        """Commit what is in this node's spool, streaming it; the files there stay.

        Samples of unlike layers or widths go into segments of their own. A `FullError` leaves
        those that were committed before it: committed again they are duplicates.
        """
        return self._states.commit(batch, spool)

    def write_facts(self, facts_id: str, facts: Mapping[str, Any]) -> None:
        """Keep what a server said of itself; nothing happens when it is kept already."""
        self.check_run()
        with disk_errors(self.path):
            create_json(self.path / "facts" / f"{checked_name(facts_id, 'facts id')}.json", facts)

    def segment_folders(self) -> list[Path]:
        """The folders whose segments may be merged: responses, each capture's states, failures."""
        captures = [self.path / "states" / name for name in self.captures()]
        return [self.path / "responses", *captures, self.path / "failures"]

    def delete_replaced(self, kept_s: float = KEPT_S, now: float | None = None) -> Deleted:
        """Delete segments that were merged into others so long ago; what was deleted."""
        self.check_run()
        return delete_replaced(self.path, self.segment_folders(), kept_s, now)

    def sweep_staging(self, older_than_s: float) -> int:
        """Remove what killed writers left and nobody touched for so long; how many folders."""
        return sweep_staging(self.path, older_than_s)
