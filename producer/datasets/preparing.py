"""Before anything is tokenized: each dataset's files, digest, form and lane, or what is wrong with it.

All datasets are looked at before the first is read, so that a mistake in the last one is not found
an hour later. Only the first rows are opened here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from producer.datasets.forms import COLUMNS, Form, Shape, find_shape
from producer.datasets.lanes import DatasetLane
from producer.datasets.manifest import Dataset
from producer.datasets.sources import find_files, read_rows, source_digest
from producer.datasets.template import Template
from storage.errors import UnsuitableError, UsageError
from storage.run import DatasetSpec

ROWS_LOOKED_AT = 64
TURNS = {
    Form.TEXT: "one",
    Form.MESSAGES: "last",
    Form.CONVERSATIONS: "last",
    Form.TURNS: "first",
    Form.INPUT_IDS: "given",
}
"""Which turns of a row make its prompt, as the dataset's semantics say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A dataset that can be read."""

    dataset: Dataset
    files: tuple[Path, ...]
    shape: Shape
    lane: DatasetLane
    spec: DatasetSpec


def prepare(dataset: Dataset, stored: DatasetSpec | None = None) -> Prepared:
    """The dataset with everything found out. `stored` is its spec in the run's folder, if it is there.

    With the same bytes in the source the stored form is taken, and no row is opened.
    Raises `UsageError` naming what its author has to change.
    """
    files = find_files(dataset.source, dataset.folder)
    digest = source_digest(files)
    unchanged = stored is not None and stored.source_digest == digest
    if stored is not None and unchanged and _agrees(dataset, stored):
        shape = Shape(form=Form(stored.form), column=stored.column)
    else:
        shape = _look(dataset, files)
    lane = _lane(dataset, shape)
    semantics: dict[str, Any] = {"turns": TURNS[shape.form]}
    if len(shape.columns) > 1:
        semantics["beside"] = list(shape.columns[1:])
    spec = DatasetSpec(
        name=dataset.name,
        source=dataset.source,
        source_digest=digest,
        form=shape.form.value,
        column=shape.column,
        lane=lane.value,
        semantics=semantics,
    )
    if stored is not None and unchanged:
        spec = replace(spec, source=stored.source)  # moved or renamed, but the same bytes
    return Prepared(dataset=dataset, files=files, shape=shape, lane=lane, spec=spec)


def check_template(prepared: Prepared, template: Template) -> None:
    """Raises `UnsuitableError` when the dataset holds conversations and the tokenizer has no template."""
    if prepared.shape.form is not Form.INPUT_IDS and not template.can_chat:
        raise UnsuitableError(
            f"{prepared.dataset.name}: the tokenizer of `{template.model}` has no chat template, and "
            f"`{prepared.shape.column}` holds {prepared.shape.form.value}, not token ids",
            code="template.missing",
            hint="name the instruct model by `--model`, or put a `chat_template.jinja` beside its tokenizer",
        )


def _agrees(dataset: Dataset, stored: DatasetSpec) -> bool:
    return dataset.form in (None, stored.form) and dataset.column in (None, stored.column)


def _look(dataset: Dataset, files: tuple[Path, ...]) -> Shape:
    rows = [row.value for row in islice(read_rows(files), ROWS_LOOKED_AT)]
    objects = [row for row in rows if isinstance(row, Mapping)]
    if not rows:
        raise UsageError(
            f"{dataset.name}: `{files[0]}` holds no row",
            code="source.empty",
            hint="take the dataset out, or fill the file",
        )
    if not objects:
        raise UsageError(
            f"{dataset.name}: none of the first {len(rows)} rows of `{files[0]}` is a JSON object",
            code="source.no_objects",
            hint="write one JSON object a line",
        )
    shape = find_shape(objects, column=dataset.column, form=dataset.form)
    if shape is None:
        wanted = f"column `{dataset.column}`" if dataset.column else "known column"
        raise UsageError(
            f"{dataset.name}: no {wanted}{_of(dataset.form)} in `{files[0]}`, which has: {_names(objects)}",
            code="source.no_column",
            hint=f'name one in the manifest: column = "…" (known by themselves: {", ".join(COLUMNS)})',
        )
    return shape


def _lane(dataset: Dataset, shape: Shape) -> DatasetLane:
    given = shape.form is Form.INPUT_IDS
    lane = dataset.lane or (DatasetLane.CAPTURE if given else DatasetLane.AUTO)
    if given != (lane is DatasetLane.CAPTURE):
        what = "is already tokenized" if given else f"holds `{shape.form.value}`, not token ids"
        raise UsageError(
            f"{dataset.name}: column `{shape.column}` {what}, so it cannot go to lane `{lane.value}`",
            code="manifest.lane",
            hint='lane = "capture" goes with input_ids, every other form with short, long or auto',
        )
    return lane


def _of(form: Form | None) -> str:
    return f" of form `{form.value}`" if form else ""


def _names(rows: Iterable[Mapping[str, Any]]) -> str:
    """The columns that there are; of those known by name, what is in them that no prompt is made of."""
    held: dict[str, str] = {}
    for row in rows:
        for name, value in row.items():
            held.setdefault(str(name), type(value).__name__)
    return (
        ", ".join(
            f"`{name}` of type {held[name]}" if name in COLUMNS else f"`{name}`" for name in list(held)[:12]
        )
        or "none"
    )
