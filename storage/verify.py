"""Checks a whole store: every segment, every byte, and the outcomes against what the run wants.

What must hold inside a segment is in `segment_checks.py`. Nothing is written or repaired here.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage.errors import DamagedError
from storage.index import Index
from storage.progress import Progress
from storage.segment import Segment, list_segments
from storage.segment_checks import (
    Found,
    Known,
    Problem,
    check_failures,
    check_prompts,
    check_responses,
    check_states,
)
from storage.settings import RunSettings, read_settings
from storage.store import Store
from storage.wanted import read_enough, wanted

_MALFORMED = (KeyError, IndexError, ValueError, TypeError)
"""What a check stumbles over in a segment whose arrays or attributes are not of its kind."""


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


class _Verification:
    def __init__(self, store: Store, progress: Progress, threads: int) -> None:
        self._store = store
        self._progress = progress
        self._threads = threads
        self._known = Known(spec=store.run.spec)
        self._problems: list[Problem] = []
        self._notes: list[str] = []
        self._samples: dict[str, int] = {"prompts": 0, "responses": 0, "states": 0, "failures": 0}
        self._segments = 0
        self._bytes = 0
        self._facts: set[str] = set()
        self._lock = threading.Lock()

    def report(self) -> Report:
        known = self._known
        # In this order, since each kind is checked against those before it.
        for dataset in self._store.dataset_names():
            for segment in self._listed(f"prompts/{dataset}"):
                self._check("prompts", segment, check_prompts(segment, dataset, known))
        for segment in self._listed("responses"):
            self._check("responses", segment, check_responses(segment, known))
        for segment in self._listed("failures"):
            self._check("failures", segment, check_failures(segment, known))
        with ThreadPoolExecutor(self._threads) as pool:
            checks = [
                pool.submit(self._check, "states", segment, check_states(segment, capture, known))
                for capture in self._store.captures()
                for segment in self._listed(f"states/{capture}")
            ]
            for check in as_completed(checks):
                check.result()
        self._note_leftovers()
        return Report(
            run=self._store.run.id,
            segments=self._segments,
            samples=self._samples,
            bytes=self._bytes,
            datasets=self._outcomes(),
            problems=tuple(sorted(self._problems, key=lambda problem: (problem.segment, problem.code))),
            notes=tuple(self._notes),
        )

    def _listed(self, folder: str) -> list[Segment]:
        """The folder's visible segments; one that cannot be opened, or a gap, is a problem."""
        parent = self._store.path / folder
        segments: list[Segment] = []
        replaced: set[str] = set()
        names = list_segments(parent)
        for name in names:
            try:
                segment = Segment(parent, name)
            except (DamagedError, OSError) as error:
                self._add("segment.damaged", f"{folder}/{name}", "", str(error))
                continue
            replaced |= segment.replaces
            segments.append(segment)
        # Numbers are given one after the other: one that is not there was taken away.
        for node in dict.fromkeys(name.node for name in names):
            numbers = [name.seq for name in names if name.node == node]
            prefix = "s-" if node is None else f"s-{node}-"
            for seq in sorted(set(range(1, max(numbers))) - set(numbers)):
                if f"{prefix}{seq:08}" not in replaced:
                    self._add("segment.missing", f"{folder}/{prefix}{seq:08}", "", "the segment is gone")
        return [segment for segment in segments if str(segment.name) not in replaced]

    def _check(self, kind: str, segment: Segment, found: Found) -> None:
        """Run one segment's checks to their end or to what stops them."""
        name = str(segment.path.relative_to(self._store.path))
        try:
            for code, key, message in found:
                self._add(code, name, key.hex(), message)
            with self._lock:
                self._facts.update(segment.attributes.get("facts", ()))
        except (DamagedError, OSError) as error:
            self._add("segment.damaged", name, "", str(error))
        except _MALFORMED as error:
            self._add("segment.malformed", name, "", repr(error))
        with self._lock:
            self._segments += 1
            self._samples[kind] += segment.samples
            self._bytes += segment.stored_bytes()
            self._say()

    def _add(self, code: str, segment: str, key: str, message: str) -> None:
        with self._lock:
            self._problems.append(Problem(code=code, segment=segment, id=key, message=message))

    def _say(self) -> None:
        self._progress.say(
            segments=self._segments,
            **self._samples,
            gb=round(self._bytes / 1e9, 2),
            problems=len(self._problems),
        )

    def _note_leftovers(self) -> None:
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
            self._notes.append("no `settings.json`: outcomes were not compared with what is wanted")
            return ()
        index = Index(self._store, settings.capture.name if settings.capture else None)
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
