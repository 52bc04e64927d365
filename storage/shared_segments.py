"""Responses and dead letters: one sequence of segments each, for all writers on all nodes.

Committing looks at every segment there is, keeps what is new, and renames onto the number behind
the last it saw. The rename fails when anybody has committed since that look, and then it looks
again: so no prompt ever has two visible responses, without a lock between machines.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from storage.catalog import Catalog, PlacedIds, placed
from storage.codec import Codec
from storage.columns import ids_array
from storage.errors import DamagedError
from storage.failures import failure_key, last_tries, read_failures, stage_failures
from storage.idtable import ABSENT
from storage.responses import ResponseColumns, stage_responses
from storage.sample import Failure, Response, Stage
from storage.segment import Segment, SegmentName, Staging
from storage.states_segments import StatesSegments

_T = TypeVar("_T", Response, Failure)
_RECENT = 8
"""Segments of responses whose small columns are kept for the next look."""


class SharedSegments:
    """The folders `responses/` and `failures/`; its methods' promises are said by `Store`'s."""

    def __init__(self, output: Path, codec: Codec, states: StatesSegments, guard: Callable[[], None]) -> None:
        self._output = output
        self._codec = codec
        self._guard = guard
        self._states = states
        self._lock = threading.RLock()
        self._responses = PlacedIds(Catalog(output / "responses"), ("id",))
        self._failures = Catalog(output / "failures")
        self._failure_keys: dict[tuple[object, ...], int] = {}
        """What failed → the last request to try it again that it has answered, see `retries.py`."""
        self._columns = lru_cache(_RECENT)(
            lambda number: ResponseColumns(self._responses.catalog.segments[number])
        )

    def response(self, sample_id: bytes) -> Response | None:
        """The visible response to this prompt.

        Looks for new segments only when it is not known, or when a compaction has moved it.
        """
        missing = ""
        looked = False
        while True:
            try:
                found = self._stored_response(sample_id)
            except FileNotFoundError as error:
                if str(error.filename) == missing:
                    raise DamagedError(f"`{missing}` is gone", code="file.missing") from None
                missing, looked = str(error.filename), False
            else:
                if found is not None or looked:
                    return found
            with self._lock:
                self._responses.refresh()
            looked = True

    def _stored_response(self, sample_id: bytes) -> Response | None:
        with self._lock:
            found = int(self._responses.find(ids_array([sample_id]))[0])
        if found == ABSENT:
            return None
        number, row = placed(found)
        return self._columns(number).response(row)

    def known_responses(self, sample_ids: Sequence[bytes]) -> list[bool]:
        """Which of these prompts have a response, as of now."""
        with self._lock:
            self._responses.refresh()
            known: list[bool] = self._responses.known(ids_array(list(sample_ids))).tolist()
        return known

    def commit_responses(self, batch: Sequence[Response]) -> int:
        """Commit those whose prompt has no response yet; how many that were."""
        return self._commit(batch, self._responses.catalog, self._new_responses, stage_responses)

    def failures(self) -> Iterator[Failure]:
        """All dead letters, those too that were made good since."""
        said: set[Failure] = set()
        while True:
            with self._lock:
                self._see_failures()
                segments = self._failures.visible()
            try:
                for segment in segments:
                    for failure in list(read_failures(segment)):
                        if failure not in said:
                            said.add(failure)
                            yield failure
            except FileNotFoundError as error:
                # Merged and deleted while we read: what is left is in segments of another name.
                if segment.path.exists():
                    raise DamagedError(f"`{error.filename}` is gone", code="file.missing") from None
            else:
                return

    def commit_failures(self, batch: Sequence[Failure]) -> int:
        """Commit those that are not there yet and that nothing stored has made good; how many.

        One that was tried after a later request than the one that is there is another.
        """
        return self._commit(batch, self._failures, self._new_failures, stage_failures)

    def _commit(
        self,
        batch: Sequence[_T],
        catalog: Catalog,
        still_new: Callable[[Sequence[_T]], list[_T]],
        stage: Callable[[Staging, Sequence[_T]], None],
    ) -> int:
        stored = 0
        while True:
            with self._lock:
                new = still_new(batch)
                name = SegmentName(node=None, seq=catalog.last_seq() + 1)
            if not new:
                return stored
            with Staging(self._output, catalog.parent.name, self._codec, self._guard) as staging:
                stage(staging, new)
                if not staging.commit(catalog.parent, name):
                    continue
            stored = len(new)
            # Who stood still since that look for as long as replaced segments are kept may have
            # taken the name of one that is deleted by now, and that a merged one hides.
            with self._lock:
                still_new(new)
                if not catalog.is_hidden(name):
                    return stored

    def _new_responses(self, batch: Sequence[Response]) -> list[Response]:
        self._responses.refresh()
        first: dict[bytes, Response] = {}
        for response in batch:
            first.setdefault(response.id, response)
        known = self._responses.known(ids_array(list(first)))
        return [response for response, is_known in zip(first.values(), known, strict=True) if not is_known]

    def _new_failures(self, batch: Sequence[Failure]) -> list[Failure]:
        self._see_failures()
        self._responses.refresh()
        return [
            failure
            for key, failure in last_tries(batch).items()
            if failure.retry > self._failure_keys.get(key, -1) and not self._made_good(failure)
        ]

    def _made_good(self, failure: Failure) -> bool:
        if failure.stage is Stage.GENERATE or failure.digest is None or failure.capture is None:
            return bool(self._responses.known(ids_array([failure.id]))[0])
        return bool(self._states.known(failure.capture, [(failure.id, failure.digest)])[0])

    def _see_failures(self) -> None:
        def enter(_: int, segment: Segment) -> None:
            for failure in read_failures(segment):
                key = failure_key(failure)
                self._failure_keys[key] = max(failure.retry, self._failure_keys.get(key, 0))

        self._failures.read_new(enter)
