"""How a run's board is drawn for a person, and the one line that says it for a log.

Pure: a `Board` in, something to print out. Where the board comes from is in `run_report.py`.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from producer.talk import Fact, is_terminal
from producer.words import big, count, duration, size
from workers.board.board import Board, DatasetBoard, ServerState

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

BAR = 20
"""Width of a dataset's bar."""


def board_console() -> "Console":
    """Where boards are printed: stdout; wide where no terminal says how wide, so that nothing is cut."""
    from rich.console import Console

    if is_terminal(sys.stdout):
        return Console(highlight=False)
    return Console(width=200, color_system=None, highlight=False)


def draw(board: Board, notes: tuple[str, ...], now: float | None = None) -> "Group":
    """The whole status: run, datasets, lanes, servers, sinks, what a person should know."""
    from rich.console import Group
    from rich.text import Text

    moment = time.time() if now is None else now
    parts: list[Text | Table] = [_head(board)]
    if board.datasets:
        parts += [Text(), _datasets(board)]
    if board.lanes:
        parts += [Text(), _lanes(board)]
    if board.servers:
        parts += [Text(), _servers(board, moment)]
    if board.sinks:
        parts += [Text(), _sinks(board)]
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


def _datasets(board: Board) -> "Table":
    table = _table("dataset", "wanted>", "generated>", "stored>", "failed>", "truncated>", "tokens>", "", "")
    for dataset in board.datasets:
        table.add_row(
            dataset.name,
            count(dataset.wanted) + ("+" if dataset.reading else ""),
            *(count(n) for n in (dataset.generated, dataset.stored, dataset.failed, dataset.truncated)),
            big(dataset.tokens),
            _bar(dataset),
            _state(dataset),
        )
    return table


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
        since = duration(now - server.since) if server.since else ""
        style = "" if server.state is ServerState.UP else "red"
        table.add_row(
            server.url, server.state.value, since, count(server.in_flight), server.reason, style=style
        )
    return table


def _sinks(board: Board) -> "Table":
    table = _table("sink", "state", "waiting>", "spool>", "")
    for sink in board.sinks:
        spool = size(sink.spool_bytes) if sink.spool_bytes is not None else ""
        table.add_row(sink.name, sink.state, count(sink.waiting), spool, sink.says)
    return table


def _table(*titles: str) -> "Table":
    """A table without lines; a title ending in `>` makes its column flush right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(
            title.removesuffix(">"), justify="right" if title.endswith(">") else "left", no_wrap=True
        )
    return table


def _bar(dataset: DatasetBoard) -> str:
    share = _share(dataset)
    full = int(share * BAR)
    return "━" * full + "·" * (BAR - full) + f" {int(share * 100):3d} %"


def _share(dataset: DatasetBoard) -> float:
    if dataset.finished:
        return 1.0
    by_samples = (dataset.stored + dataset.failed) / dataset.wanted if dataset.wanted else 0.0
    by_tokens = dataset.tokens / dataset.max_tokens if dataset.max_tokens else 0.0
    return min(1.0, max(by_samples, by_tokens))


def _state(dataset: DatasetBoard) -> str:
    if dataset.finished:
        return "done"
    return "caps reached" if dataset.closed else ""
