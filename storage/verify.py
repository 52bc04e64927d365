"""Checks a whole store: every segment, every byte, and the outcomes against what the run wants.

What must hold inside a segment is in `segment_checks.py`. Nothing is written or repaired here.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from storage.errors import DamagedError
from storage.idtable import IdTable
from storage.index import Index
from storage.progress import Progress
from storage.replaced import KEPT_S, replaced
from storage.segment import Segment, SegmentName, list_segments
from storage.segment_checks import (
    Found,
    Known,
    Problem,
    check_failures,
    check_prompts,
    check_responses,
    check_states,
)
from storage.settings import RunSettings, all_wanted, read_settings
from storage.store import Store
from storage.wanted import read_enough, wanted

_MALFORMED = (KeyError, IndexError, ValueError, TypeError)
"""What a check stumbles over in a segment whose arrays or attributes are not of its kind."""

SWEPT_S = 3600.0
"""How long after its time a replaced segment may still be there: sinks look now and then."""
_MOST_MISSING = 10_000
"""Segments that are named one by one when they are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOutcome:
    """How far a dataset is from what its settings want."""

    name: str
    wanted: int
    done: int
    failed: int
    """Dead letters: an outcome too, so they leave nothing to do."""
    missing: int
    read: bool
    """Whether as many prompts were read as are wanted, or all there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found."""

    run: str
    segments: int
    samples: dict[str, int]
    """Kind of segment → rows in it."""
    bytes: int
    """Bytes of the segments that were read."""
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    """What is worth knowing and harms nothing."""
    datasets: tuple[DatasetOutcome, ...]

    @property
    def complete(self) -> bool:
        """Whether every wanted prompt has its outcome."""
        return all(dataset.read and not dataset.missing for dataset in self.datasets)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong and nothing is missing."""
        return self.complete and not self.problems

    def to_json(self) -> dict[str, Any]:
        """As `storage verify --json` prints it."""
        return {**asdict(self), "complete": self.complete, "ok": self.ok}


def verify(path: Path, progress: Progress, threads: int | None = None) -> Report:
    """Read and check everything in the store.

    Raises `UnavailableError` when there is no run and `DamagedError` when `run.json` is damaged;
    anything else that is wrong is a problem in the report.
    """
    return _Verification(Store.open(path), progress, threads or os.cpu_count() or 1).report()


def _left_out(names: list[SegmentName], hidden: set[str]) -> list[str]:
    """Numbers are given one after the other: the names of those that were taken away."""
    missing = []
    for node in dict.fromkeys(name.node for name in names):
        numbers = {name.seq for name in names if name.node == node}
        for seq in range(1, max(numbers)):
            name = str(SegmentName(node=node, seq=seq))
            if seq not in numbers and name not in hidden:
                missing.append(name)
            if len(missing) > _MOST_MISSING:
                return missing
    return missing


class _Verification:
    def __init__(self, store: Store, progress: Progress, threads: int) -> None:
        self._store = store
        self._progress = progress
        self._threads = threads
        self._known = Known(spec=store.run.spec)
        self._problems: list[Problem] = []
        self._notes: list[str] = []
        self._counted: dict[str, tuple[str, int, int]] = {}
        """Segment that was read → its kind, its rows, its bytes."""
        self._samples: dict[str, int] = {"prompts": 0, "responses": 0, "states": 0, "failures": 0}
        self._bytes = 0
        self._facts: set[str] = set()
        self._lock = threading.Lock()

    def report(self) -> Report:
        known = self._known
        # In this order, since each kind is checked against those before it.
        for dataset in self._store.dataset_names():
            for segment in self._listed(f"prompts/{dataset}"):
                self._check("prompts", segment, check_prompts(segment, dataset, known))
        self._check_all("responses", partial(check_responses, known=known))
        self._check_all("failures", partial(check_failures, known=known))
        for capture in self._store.captures():
            self._check_all(f"states/{capture}", partial(check_states, capture=capture, known=known))
        self._note_leftovers()
        return Report(
            run=self._store.run.id,
            segments=len(self._counted),
            samples=self._samples,
            bytes=self._bytes,
            datasets=self._outcomes(),
            problems=tuple(sorted(set(self._problems), key=lambda problem: (problem.segment, problem.code))),
            notes=tuple(self._notes),
        )

    def _check_all(self, folder: str, check: Callable[[Segment], Found]) -> None:
        """Check the folder's segments, several at a time where they do not depend on each other.

        A segment that is deleted meanwhile was merged into another: the folder is looked at again.
        """
        kind = folder.partition("/")[0]
        checked: dict[str, bool] = {}
        with ThreadPoolExecutor(self._threads if kind == "states" else 1) as pool:
            while True:
                segments = self._listed(folder)
                names = {str(segment.name) for segment in segments}
                # Which prompt has a response is also known from segments that are gone: begin anew.
                for name in list(checked) if kind == "responses" else checked.keys() - names:
                    self._forget(f"{folder}/{name}")
                    del checked[name]
                if kind == "responses":
                    self._known.responses, self._known.sequences = IdTable(), IdTable()
                fresh = [segment for segment in segments if str(segment.name) not in checked]
                results = pool.map(lambda segment: self._check(kind, segment, check(segment)), fresh)
                for segment, whole in zip(fresh, results, strict=True):
                    checked[str(segment.name)] = whole
                if all(checked.values()):
                    return

    def _listed(self, folder: str) -> list[Segment]:
        """The folder's visible segments; one that cannot be opened, or a gap, is a problem."""
        parent = self._store.path / folder
        while True:
            segments: list[Segment] = []
            hidden: set[str] = set()
            damaged: dict[str, str] = {}
            names = list_segments(parent)
            try:
                for name in names:
                    try:
                        segment = Segment(parent, name)
                    except DamagedError as error:
                        damaged[str(name)] = error.message
                        continue
                    hidden |= segment.replaces
                    segments.append(segment)
                break
            except FileNotFoundError:
                continue  # merged and deleted since the listing: list again
        for at, why in damaged.items():
            if at not in hidden:
                self._add("segment.damaged", f"{folder}/{at}", "", why)
        for at in _left_out(names, hidden):
            self._add("segment.missing", f"{folder}/{at}", "", "the segment is gone")
        return [segment for segment in segments if str(segment.name) not in hidden]

    def _check(self, kind: str, segment: Segment, found: Found) -> bool:
        """Run one segment's checks to their end or to what stops them; False when it was deleted."""
        name = str(segment.path.relative_to(self._store.path))
        size_bytes = 0
        try:
            for code, key, message in found:
                self._add(code, name, key.hex(), message)
            with self._lock:
                self._facts.update(segment.attributes.get("facts", ()))
        except (DamagedError, OSError) as error:
            if not segment.path.exists():
                return False
            self._add("segment.damaged", name, "", str(error))
        except _MALFORMED as error:
            self._add("segment.malformed", name, "", repr(error))
        with suppress(FileNotFoundError):
            size_bytes = segment.stored_bytes()
        with self._lock:
            self._count(name, kind, segment.samples, size_bytes)
            self._say()
        return True

    def _forget(self, name: str) -> None:
        """A segment that has been merged into another: the other is counted and judged."""
        with self._lock:
            if name in self._counted:
                kind, samples, size_bytes = self._counted.pop(name)
                self._samples[kind] -= samples
                self._bytes -= size_bytes
            self._problems = [problem for problem in self._problems if problem.segment != name]

    def _count(self, name: str, kind: str, samples: int, size_bytes: int) -> None:
        self._counted[name] = (kind, samples, size_bytes)
        self._samples[kind] += samples
        self._bytes += size_bytes

    def _add(self, code: str, segment: str, key: str, message: str) -> None:
        with self._lock:
            self._problems.append(Problem(code=code, segment=segment, id=key, message=message))

    def _say(self) -> None:
        self._progress.say(
            segments=len(self._counted),
            **self._samples,
            gb=round(self._bytes / 1e9, 2),
            problems=len(self._problems),
        )

    def _note_leftovers(self) -> None:
        waiting = 0
        for folder in self._store.segment_folders():
            for one in replaced(folder):
                if one.since > time.time() - KEPT_S - SWEPT_S:
                    waiting += 1
                else:
                    self._notes.append(
                        f"`{one.path.relative_to(self._store.path)}` was merged into another over a day ago: "
                        f"`storage compact {self._store.path}` deletes it"
                    )
        if waiting:
            self._notes.append(f"{waiting} segments were merged into others; they are deleted a day later")
        staged = len(list((self._store.path / ".staging").glob("*")))
        if staged:
            self._notes.append(f"{staged} uncommitted staging folders, of running or killed writers")
        for name in sorted(self._facts - {""}):
            if not (self._store.path / "facts" / f"{name}.json").exists():
                self._notes.append(f"facts `{name}` of a server are not kept")

    def _outcomes(self) -> tuple[DatasetOutcome, ...]:
        try:
            settings = read_settings(self._store.path)
        except FileNotFoundError:
            self._notes.append("no `settings.json`: every prompt of every dataset is taken as wanted")
            settings = all_wanted(self._store.run.spec, self._store.dataset_names())
        capture = settings.capture.name if settings.capture else None
        index = Index(self._store, capture, settings.retries)
        try:
            index.refresh()
            return tuple(self._outcome(index, settings, name) for name in sorted(settings.datasets))
        except (DamagedError, OSError, *_MALFORMED) as error:
            self._add("outcomes.unknown", "", "", f"what is left cannot be counted: {error!r}")
            return ()

    def _outcome(self, index: Index, settings: RunSettings, name: str) -> DatasetOutcome:
        if name not in index.datasets:
            return DatasetOutcome(name=name, wanted=0, done=0, failed=0, missing=0, read=False)
        cap, dataset = settings.datasets[name], index.dataset(name)
        counts = wanted(dataset, cap, settings.states)
        complete = self._store.reading_state(name).complete
        return DatasetOutcome(
            name=name,
            wanted=counts.total,
            done=counts.done,
            failed=counts.failed,
            missing=len(counts.missing),
            read=read_enough(dataset, cap, counts, complete=complete),
        )
