"""The manifest: which datasets there are and what its author says of each.

`datasets.toml` holds `[[dataset]]` tables. This file checks names, keys and values; it opens no
source (`sources.py`) and guesses no form (`forms.py`).
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producer.datasets.forms import Form
from producer.datasets.lanes import DatasetLane
from storage.errors import UsageError
from storage.files import checked_name
from storage.json_records import is_count
from storage.settings import DatasetSettings
from storage.suggest import did_you_mean
from workers.config import check_keys

DEFAULT_MANIFEST = Path("datasets.toml")
BUNDLED = Path(__file__).parents[1] / "data" / "datasets.toml"
"""The manifest of the prompts that come with this distribution."""
ALL = "all"
MAX_BYTES = 16 << 20
"""A longer file is data that somebody named in the manifest's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One `[[dataset]]` table."""

    name: str
    source: str
    """As written: `file:` and a path or glob, relative to the manifest's folder."""
    folder: Path
    """The manifest's folder."""
    lane: DatasetLane | None = None
    """None leaves it to the form: `capture` for token ids, `auto` for all others."""
    column: str | None = None
    """The column to read; None finds one by its name."""
    form: Form | None = None
    """What the column holds; None finds out by its values."""
    max_samples: int | None = None
    """The first so many eligible prompts; None for all."""
    max_tokens: int | None = None
    """Prompt and response tokens stored; None for no cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Some datasets and where they were named."""

    path: Path
    datasets: tuple[Dataset, ...]
    bundled: bool = False
    """Whether these are the prompts that come with this distribution."""


KEYS = frozenset({"name", "source", "lane", "column", "form", "max_samples", "max_tokens"})
LATER = {
    "split": "a split belongs to a hub source; a `file:` source names its files",
    "config": "a config belongs to a hub source; a `file:` source names its files",
}
DATA_FILE = re.compile(r"\.(jsonl|ndjson|json|parquet)(\.gz)?$", re.IGNORECASE)


def find_manifest(named: Path | None) -> Manifest:
    """The manifest at the path named, else `datasets.toml` here, else the bundled one.

    A prompt file may be named in a manifest's place: it is one dataset, called as the file.
    Raises `UsageError` for what cannot be read or understood.
    """
    if named is None:
        if DEFAULT_MANIFEST.is_file():
            return read_manifest(DEFAULT_MANIFEST)
        bundled = read_manifest(BUNDLED)
        return Manifest(path=bundled.path, datasets=bundled.datasets, bundled=True)
    if found := DATA_FILE.search(named.name):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", named.name[: found.start()]).strip("-._") or "prompts"
        folder = named.parent.absolute()
        one = Dataset(name=name[:100], source=f"file:{named.name}", folder=folder)
        return Manifest(path=named, datasets=(one,))
    return read_manifest(named)


def read_manifest(path: Path) -> Manifest:
    """The manifest in this file. Raises `UsageError` naming what its author has to change."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES} bytes")
        content = tomllib.loads(text.decode())
    except OSError as error:
        raise UsageError(
            f"manifest `{path}` cannot be read: {error.strerror}",
            code="manifest.missing",
            hint="name one with `--manifest`, or leave it out for the bundled prompts",
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"manifest `{path}` is not TOML: {error}",
            code="manifest.syntax",
            hint='each dataset is a table: [[dataset]], then lines like name = "a", source = "file:a.jsonl"',
        ) from None
    check_keys(content, frozenset({"dataset"}), where=str(path))
    tables = content.get("dataset", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise UsageError(
            f"manifest `{path}` names no dataset",
            code="manifest.empty",
            hint='write tables like: [[dataset]] name = "B1" source = "file:prompts.jsonl"',
        )
    datasets = tuple(_dataset(table, path) for table in tables)
    seen: set[str] = set()
    for dataset in datasets:
        if dataset.name.casefold() in seen:
            raise UsageError(
                f"two datasets are called `{dataset.name}` in `{path}`",
                code="manifest.name",
                hint="names become folders, so they must differ by more than case",
            )
        seen.add(dataset.name.casefold())
    return Manifest(path=path, datasets=datasets)


def choose(manifest: Manifest, partition: str) -> tuple[Dataset, ...]:
    """The datasets that `--partition` names, in the manifest's order.

    Raises `UsageError` for a name that is none, with the nearest that is.
    """
    wanted = [name.strip() for name in partition.split(",") if name.strip()]
    if not wanted:
        raise UsageError("`--partition` names nothing", code="partition.empty", hint="--partition all")
    if wanted == [ALL]:
        return manifest.datasets
    names = [dataset.name for dataset in manifest.datasets]
    for name in wanted:
        if name not in names:
            raise UsageError(
                f"no dataset `{name}` in `{manifest.path}`",
                code="partition.unknown",
                hint=did_you_mean(name, [*names, ALL]),
            )
    return tuple(dataset for dataset in manifest.datasets if dataset.name in wanted)


def caps_of(dataset: Dataset, *, max_samples: int | None, max_tokens: int | None) -> DatasetSettings:
    """The dataset's own caps and those of the command line, the lower of each."""

    def lower(*caps: int | None) -> int | None:
        return min((cap for cap in caps if cap is not None), default=None)

    return DatasetSettings(
        max_samples=lower(dataset.max_samples, max_samples),
        max_tokens=lower(dataset.max_tokens, max_tokens),
    )


def _dataset(table: Mapping[str, Any], path: Path) -> Dataset:
    name = table.get("name")
    if not isinstance(name, str):
        raise UsageError(
            f"a dataset without a name in `{path}`", code="manifest.name", hint='give it one: name = "B1"'
        )
    where = f"{path}, dataset {name}"
    if checked_name(name, "dataset") == ALL:
        raise UsageError(
            "a dataset cannot be called `all`: `--partition all` means every one", code="manifest.name"
        )
    for key, why in LATER.items():
        if key in table:
            raise UsageError(f"`{key}` in `{where}` has no meaning: {why}", code="manifest.value")
    check_keys(table, KEYS, where=where)
    source = _text(table, "source", where)
    if source is None:
        raise UsageError(
            f"`source` is missing in `{where}`",
            code="manifest.value",
            hint='say where its rows are: source = "file:prompts.jsonl"',
        )
    if not source.startswith("file:") or not source.removeprefix("file:").strip():
        raise UsageError(
            f"source `{source}` in `{where}` is not one this Eyas can read",
            code="manifest.source",
            hint='name files: source = "file:prompts/*.jsonl" (relative to the manifest)',
        )
    lane = _choice(table, "lane", [lane.value for lane in DatasetLane], where)
    form = _choice(table, "form", [form.value for form in Form], where)
    return Dataset(
        name=name,
        source=source,
        folder=path.parent.absolute(),
        lane=DatasetLane(lane) if lane else None,
        column=_text(table, "column", where),
        form=Form(form) if form else None,
        max_samples=_count(table, "max_samples", where),
        max_tokens=_count(table, "max_tokens", where),
    )


def _text(table: Mapping[str, Any], key: str, where: str) -> str | None:
    value = table.get(key)
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise UsageError(f"`{key}` in `{where}` is not a text: `{value!r}`"[:300], code="manifest.value")
    return value


def _count(table: Mapping[str, Any], key: str, where: str) -> int | None:
    value = table.get(key)
    if value is None:
        return None
    if not is_count(value) or value < 1:
        raise UsageError(
            f"`{key}` in `{where}` is `{value!r}`: it must be a whole number of at least 1"[:300],
            code="manifest.value",
            hint=f"leave `{key}` out for no cap; leave the dataset out with `--partition`",
        )
    return int(value)


def _choice(table: Mapping[str, Any], key: str, known: Sequence[str], where: str) -> str | None:
    value = _text(table, key, where)
    if value is not None and value not in known:
        raise UsageError(
            f"`{key}` in `{where}` is `{value}`", code="manifest.value", hint=did_you_mean(value, known)
        )
    return value
