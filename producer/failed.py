"""The dead letters of a run as `status --failed` lists them and `retry` counts them.

Finds the run's folder, through Redis where none is named. Which dead letters stand is decided in
`storage/standing.py`.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from producer.talk import is_terminal
from storage.errors import UnavailableError
from storage.run import DEFAULT_OUTPUT_DIR
from storage.standing import Standing, standing

if TYPE_CHECKING:
    from storage.store import Store

COLUMNS = ("id", "dataset", "row", "stage", "code", "attempts", "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A run's folder and who carries it."""

    folder: Path
    carried: bool
    """Whether the Redis asked carries this run."""
    other: str | None
    """The folder of another, unfinished run that this Redis carries."""


def find_run(redis_url: str, output_dir: Path | None) -> Found:
    """The run in this folder, or the one that Redis carries, or the one where it would be by default."""
    from workers.board.presence import glance

    seen = glance(redis_url)
    carried = seen.carried if seen else None
    folder = output_dir or (Path(carried.output_dir) if carried else Path(DEFAULT_OUTPUT_DIR))
    folder = folder.absolute()
    is_it = carried is not None and carried.run == open_run(folder).run
    other = carried.output_dir if carried is not None and not is_it and not carried.finished else None
    return Found(folder=folder, carried=is_it, other=other)


def open_run(folder: Path) -> "Store":
    """The store; raises `UnavailableError` (`run.missing`)."""
    from storage.store import Store

    return Store.open(folder)


def dead_letters(folder: Path) -> list[Standing]:
    """Those of the run in this folder that stand.

    Raises `UnavailableError` where there is no run or it has no settings yet.
    """
    from storage.settings import read_settings

    store = open_run(folder)
    try:
        settings = read_settings(folder)
    except FileNotFoundError:
        raise UnavailableError(
            f"the run in `{folder}` has no settings yet",
            code="settings.missing",
            hint="run `producer enqueue` again: it was ended before it had written them",
        ) from None
    return standing(store, settings)


def counts(letters: Iterable[Standing]) -> dict[str, int]:
    """Code → dead letters, most first."""
    return dict(Counter(one.failure.code for one in letters).most_common())


def row_of(one: Standing) -> dict[str, Any]:
    """One dead letter as `--json` has it."""
    failure = one.failure
    return {
        "id": failure.id.hex(),
        "dataset": failure.dataset,
        "row": one.source_row,
        "stage": failure.stage.value,
        "code": failure.code,
        "attempts": failure.attempts,
        "message": failure.message,
        "again": one.again,
    }


def listing(letters: Sequence[Standing], *, as_json: bool) -> str:
    """All of them: counts by code first, then one line each; tabs between the columns in a pipe."""
    if as_json:
        again = sum(one.again for one in letters)
        content = {"failed": len(letters) - again, "again": again, "codes": counts(letters)}
        return json.dumps(content | {"dead_letters": [row_of(one) for one in letters]}, indent=2)
    if is_terminal(sys.stdout):
        return _table(letters)
    lines = [f"# {count} {code}" for code, count in counts(letters).items()]
    lines += ["\t".join(COLUMNS)] if letters else ["# nothing has failed"]
    return "\n".join([*lines, *("\t".join(_cells(one)) for one in letters)])


def _cells(one: Standing) -> list[str]:
    row = row_of(one)
    if one.again:
        row["code"] += " (asked again)"
    # A message may hold what a server said, line breaks and tabs included.
    return [" ".join(str(row[name]).split()) for name in COLUMNS]


def _table(letters: Sequence[Standing]) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not letters:
        return "nothing has failed"
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in COLUMNS:
        # Whole ids and codes: they are copied into `producer retry`.
        table.add_column(name, overflow="fold", no_wrap=name in ("code", "row", "stage", "attempts"))
    for one in letters:
        table.add_row(*map(Text, _cells(one)))  # a server's words are no markup
    with console.capture() as captured:
        for code, count in counts(letters).items():
            console.print(f"{count:>7}  {code}", style="bold")
        console.print()
        console.print(table)
    return captured.get().rstrip("\n")
