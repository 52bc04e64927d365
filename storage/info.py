"""What a store holds, in counts: read from the ids, offsets and file sizes, never the samples."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from storage.catalog import Catalog
from storage.check_log import CheckLog
from storage.checks import ChecksSummary
from storage.files import folder_bytes
from storage.index import Index, Outcome
from storage.replaced import replaced
from storage.segment import list_segments
from storage.settings import read_settings
from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """One dataset's counts."""

    name: str
    source: str
    prompts: int
    read: bool
    """Whether the source has been read to its end."""
    dropped: dict[str, int]
    """Reason → rows that gave no prompt."""
    responses: int
    stored: int
    """Samples with their states."""
    dead: int
    prompt_tokens: int
    """Of all prompts."""
    sample_tokens: int
    """Prompt and response, of all that have a response."""
    truncated: float
    """Share of the responses that ended at their length limit; 0 without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """A store's counts."""

    path: str
    run: str
    fingerprint: str
    model: str
    states: str
    capture: str | None
    """The capture that `stored` counts."""
    captures: tuple[str, ...]
    """All captures there are states of."""
    datasets: tuple[DatasetInfo, ...]
    segments: dict[str, int]
    """Kind → segments that count."""
    bytes: dict[str, int]
    """Kind → bytes on disk, without what was replaced."""
    replaced_segments: int
    """Merged into others, and deleted a day later."""
    replaced_bytes: int
    checks: dict[str, ChecksSummary]
    """Capture → what checking some of its samples came to; a capture without a check is not among them."""

    def to_json(self) -> dict[str, Any]:
        """As `storage info --json` prints it."""
        return asdict(self)


def info(path: Path) -> Info:
    """Count what is in the store; raises `UnavailableError` when there is no run."""
    store = Store.open(path)
    spec = store.run.spec
    try:
        settings = read_settings(path)
        states, capture, retries = settings.states, settings.capture, settings.retries
    except FileNotFoundError:
        states, capture, retries = spec.states, spec.capture, ()
    index = Index(store, capture.name if capture else None, retries)
    index.refresh()
    folders = {
        "prompts": [path / "prompts" / name for name in store.dataset_names()],
        "responses": [path / "responses"],
        "states": [path / "states" / name for name in store.captures()],
        "failures": [path / "failures"],
    }
    old = [one for parents in folders.values() for parent in parents for one in replaced(parent)]
    old_bytes = dict.fromkeys(folders, 0)
    for one in old:
        old_bytes[one.path.relative_to(path).parts[0]] += folder_bytes(one.path)
    return Info(
        path=str(path),
        run=store.run.id,
        fingerprint=spec.fingerprint,
        model=spec.model,
        states=str(states),
        capture=capture.name if capture else None,
        captures=store.captures(),
        datasets=tuple(_dataset(store, index, name) for name in index.datasets),
        segments={
            kind: sum(map(_segments, parents)) - sum(one.path.parent in parents for one in old)
            for kind, parents in folders.items()
        },
        bytes={kind: folder_bytes(path / kind) - old_bytes[kind] for kind in folders},
        replaced_segments=len(old),
        replaced_bytes=sum(old_bytes.values()),
        checks=_checks(path, store.captures()),
    )


def _checks(path: Path, captures: tuple[str, ...]) -> dict[str, ChecksSummary]:
    found = {}
    for capture in captures:
        catalog = Catalog(path / "states" / capture)
        catalog.refresh()
        summary = CheckLog().follow(catalog)
        if summary is not None:
            found[capture] = summary
    return found


def _dataset(store: Store, index: Index, name: str) -> DatasetInfo:
    dataset = index.dataset(name)
    state = store.reading_state(name)
    spec = store.dataset_spec(name)
    responses = int(np.count_nonzero(dataset.sample_tokens))
    return DatasetInfo(
        name=name,
        source=spec.source if spec else "",
        prompts=len(dataset),
        read=state.complete,
        dropped=dict(state.dropped),
        responses=responses,
        stored=dataset.count(Outcome.STORED),
        dead=dataset.count(Outcome.DEAD),
        prompt_tokens=int(dataset.prompt_tokens.sum(dtype=np.int64)),
        sample_tokens=int(dataset.sample_tokens.sum(dtype=np.int64)),
        truncated=round(dataset.truncated / responses, 4) if responses else 0.0,
    )


def _segments(parent: Path) -> int:
    return len(list_segments(parent))
