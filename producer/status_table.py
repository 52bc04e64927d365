"""How a run's board is drawn for a person, and the one line that says it for a log.

Pure: a `Board` in, something to print out. Where the board comes from is in `run_report.py`.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from producer.talk import Fact, is_terminal
from producer.words import big, count, duration, size
from storage.checks import ChecksSummary
from workers.board.board import Board, DatasetBoard, ServerBoard, SinkBoard
from workers.board.processes import ServerState

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

BAR = 20
"""Width of a dataset's bar; half of it where there is less room."""
ALARMS = 5
"""Alarms of checks that are shown one by one."""
WIDE = 200
"""Columns where nobody says how many there are, so that nothing is cut."""


def board_console() -> "Console":
    """Where boards are printed: stdout, as wide as its terminal or `COLUMNS` says."""
    from rich.console import Console

    if is_terminal(sys.stdout):
        return Console(highlight=False)
    width = None if os.environ.get("COLUMNS") else WIDE
    return Console(width=width, color_system=None, highlight=False)


def draw(board: Board, notes: tuple[str, ...], width: int = WIDE, now: float | None = None) -> "Group":
    """The whole status: run, datasets, lanes, servers, sinks, what a person should know.

    In fewer columns than it takes the titles are shorter, the bars are gone and reasons have lines
    of their own; no word is cut that is not longer than a line.
    """
    from rich.console import Group
    from rich.text import Text

    moment = time.time() if now is None else now
    parts: list[Text | Table] = [_head(board)]
    if board.datasets:
        tables = (_datasets(board, BAR), _datasets(board, BAR // 2), _datasets_narrow(board))
        parts.append(Text())
        fits = next((table for table in tables if _width(table) <= width), None)
        parts += [fits] if fits is not None else [Text(_line(dataset)) for dataset in board.datasets]
    if board.lanes:
        parts += [Text(), _lanes(board)]
    if board.servers:
        wide = _servers(board, moment)
        parts += [Text(), wide] if _width(wide) <= width else [Text(), *_servers_narrow(board, moment)]
    if board.sinks:
        wide = _sinks(board)
        parts += [Text(), wide] if _width(wide) <= width else [Text(), *_sinks_narrow(board)]
    if board.wasted or any(dataset.failed for dataset in board.datasets):
        parts += [Text(), *map(Text, _lost(board))]
    if board.checks is not None:
        parts += [Text(), *_checks(board.checks)]
    for reason in (f": {server.reason}" for server in board.servers if server.reason):
        # it stands in the server's row already
        notes = tuple(note.removesuffix(reason) for note in notes)
    if notes:
        parts.append(Text())
        parts += [Text(f"! {note}", style="yellow") for note in notes]
    return Group(*parts)


def facts(board: Board) -> dict[str, Fact]:
    """The same in one line of a log."""
    said: dict[str, Fact] = {
        "done": board.done,
        "wanted": board.wanted,
        "generated": sum(d.generated for d in board.datasets),
        "stored": sum(d.stored for d in board.datasets),
        "failed": sum(d.failed for d in board.datasets),
        "tokens": sum(d.tokens for d in board.datasets),
    }
    for lane in board.lanes:
        said[f"{lane.name}_in_flight"] = lane.in_flight
    if board.rates is not None:
        said["generated_tok_per_s"] = round(board.rates.generated_tokens_per_s, 1)
        said["samples_per_s"] = round(board.rates.samples_per_s, 2)
    if board.left_s is not None and not board.finished:
        said["left_s"] = round(board.left_s)
    said["sink_waiting"] = board.sink_waiting
    if board.wasted:
        said |= {"wasted_calls": board.wasted, "wasted_tokens": board.wasted_tokens}
    if board.checks is not None:
        said |= {"checked": board.checks.samples, "alarmed": board.checks.alarmed}
    away = [server.url for server in board.servers if server.state is not ServerState.UP]
    if away:
        said["servers_not_up"] = ",".join(away)
    return said


def _head(board: Board) -> "Text":
    from rich.text import Text

    text = Text()
    text.append(f"run {board.run_id[:8]}", style="bold")
    text.append(f" · {Path(board.model).name} · states {board.states} · {board.output_dir}\n")
    text.append(" · ".join(_progress(board)))
    return text


def _progress(board: Board) -> Iterator[str]:
    yield f"{count(board.done)} of {count(board.wanted)} samples"
    if any(dataset.reading for dataset in board.datasets):
        yield "still reading prompts"
    yield f"{big(sum(d.tokens for d in board.datasets))} tokens"
    if board.finished:
        failed = sum(d.failed for d in board.datasets)
        yield f"finished, {count(failed)} failed" if failed else "finished"
        return
    if board.rates is not None:
        yield f"{board.rates.samples_per_s:.1f} samples/s"
        yield f"{big(board.rates.generated_tokens_per_s)} tok/s generated"
    if board.left_s is not None:
        yield f"{duration(board.left_s)} left"


def _datasets(board: Board, bar: int) -> "Table":
    table = _table("dataset", "wanted>", "generated>", "stored>", "failed>", "truncated>", "tokens>", "", "")
    for dataset in board.datasets:
        table.add_row(*_counts(dataset), _bar(dataset, bar), _state(dataset))
    return table


def _line(dataset: DatasetBoard) -> str:
    """A dataset where no table fits: its name whole, then what fits into as many lines as it takes."""
    failed = f", {count(dataset.failed)} failed" if dataset.failed else ""
    state = f", {_state(dataset)}" if _state(dataset) else f", {int(dataset.share * 100)} %"
    return f"{dataset.name}: {count(dataset.stored)} of {_counts(dataset)[1]} stored{failed}{state}"


def _lost(board: Board) -> Iterator[str]:
    failed = sum(dataset.failed for dataset in board.datasets)
    if failed:
        hint = "`producer status --failed` lists them, `producer retry` tries them again"
        yield f"{count(failed)} failed: {hint}"
    if board.wasted:
        calls = "1 call" if board.wasted == 1 else f"{count(board.wasted)} calls"
        yield f"wasted: {calls}, {big(board.wasted_tokens)} tokens (what they made was stored already)"


def _datasets_narrow(board: Board) -> "Table":
    table = _table("dataset", "wanted>", "gen.>", "stored>", "failed>", "cut>", "tokens>", ">", "", gap=2)
    for dataset in board.datasets:
        state = "capped" if dataset.closed and not dataset.finished else _state(dataset)
        table.add_row(*_counts(dataset), f"{int(dataset.share * 100)} %", state)
    return table


def _counts(dataset: DatasetBoard) -> tuple[str, ...]:
    return (
        dataset.name,
        count(dataset.wanted) + ("+" if dataset.reading else ""),
        *(count(n) for n in (dataset.generated, dataset.stored, dataset.failed, dataset.truncated)),
        big(dataset.tokens),
    )


def _lanes(board: Board) -> "Table":
    table = _table("lane", "limit>", "in flight>", "waiting>", "processes>")
    for lane in board.lanes:
        table.add_row(
            lane.name, count(lane.limit), count(lane.in_flight), count(lane.waiting), count(lane.processes)
        )
    return table


def _servers(board: Board, now: float) -> "Table":
    table = _table("server", "state", "since>", "in flight>", "")
    for server in board.servers:
        table.add_row(*_of_server(server, now), server.reason, style=_style(server))
    return table


def _servers_narrow(board: Board, now: float) -> "Iterator[Table | Text]":
    table = _table("server", "state", "since>", "in flight>", gap=2)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for server in board.servers:
        table.add_row(*_of_server(server, now), style=_style(server))
    yield table
    yield from _says({server.url: server.reason for server in board.servers})


def _of_server(server: ServerBoard, now: float) -> tuple[str, ...]:
    since = duration(now - server.since) if server.since else ""
    return (server.url, server.state.value, since, count(server.in_flight))


def _style(server: ServerBoard) -> str:
    return "" if server.state is ServerState.UP else "red"


def _sinks(board: Board) -> "Table":
    table = _table("sink", "state", "waiting>", "spool>", "")
    for sink in board.sinks:
        table.add_row(*_of_sink(sink), sink.says)
    return table


def _sinks_narrow(board: Board) -> "Iterator[Table | Text]":
    table = _table("sink", "state", "waiting>", "spool>", gap=2)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for sink in board.sinks:
        table.add_row(*_of_sink(sink))
    yield table
    yield from _says({sink.name: sink.says for sink in board.sinks})


def _of_sink(sink: SinkBoard) -> tuple[str, ...]:
    spool = size(sink.spool_bytes) if sink.spool_bytes is not None else ""
    return (sink.name, sink.state, count(sink.waiting), spool)


def _checks(checks: ChecksSummary) -> "Iterator[Text]":
    """What checking came to, and each alarm in red."""
    from rich.text import Text

    yield Text(f"checks: {checks}", style="red" if checks.alarmed else "")
    for alarm in checks.alarms[:ALARMS]:
        yield Text(f"! {alarm}", style="red")
    if len(checks.alarms) > ALARMS:
        yield Text("more: `storage info`", style="red")


def _says(by_name: dict[str, str]) -> "Iterator[Text]":
    """What each of these says, as lines that wrap."""
    from rich.text import Text

    for name, says in by_name.items():
        if says:
            yield Text(f"{name}: {says}")


def _table(*titles: str, gap: int = 3) -> "Table":
    """A table without lines, `gap` spaces between its columns; a title ending in `>` makes its column
    flush right.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, gap - 2), pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(
            title.removesuffix(">"), justify="right" if title.endswith(">") else "left", no_wrap=True
        )
    return table


def _width(table: "Table") -> int:
    """Columns the table takes when nothing of it is cut or wrapped."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=10 * WIDE)
    return Measurement.get(console, console.options, table).maximum


def _bar(dataset: DatasetBoard, width: int) -> str:
    share = dataset.share
    full = int(share * width)
    return "━" * full + "·" * (width - full) + f" {int(share * 100):3d} %"


def _state(dataset: DatasetBoard) -> str:
    if dataset.finished:
        return "done"
    return "caps reached" if dataset.closed else ""
