"""`producer watch`: how far the run is, live, until it is finished.

On a terminal the status redraws itself; elsewhere a `key=value` line every few seconds. Both are what the
command reports, and go to stdout. It only looks: ending it changes nothing about the run.
"""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from producer import options
from producer.talk import LINE_EVERY_S, is_terminal, line, say
from storage.errors import UnavailableError
from workers.config import load_config

if TYPE_CHECKING:
    from producer.run_report import Report

REDRAW_S = 1.0


def follow(redis_url: str, output_dir: Path | None) -> int:
    """Shows the run until it is finished; the exit status is 1 when samples failed, else 0.

    Raises `UnavailableError` when there is no run to follow, and `KeyboardInterrupt` as it comes.
    """
    from producer.run_report import look

    def again() -> "Report":
        nonlocal output_dir
        report = look(redis_url, output_dir)
        # Without Redis the folder by default would be looked at: it may hold another run.
        output_dir = output_dir or Path(report.board.output_dir)
        return report

    report = _live(again) if is_terminal(sys.stdout) else _lines(again)
    return 1 if report.failed else 0


def _live(look: "Callable[[], Report]") -> "Report":
    from rich.live import Live

    from producer.status_table import board_console, draw

    report, console = look(), board_console()
    with Live(console=console, auto_refresh=False) as live:
        live.update(draw(report.board, report.notes, console.width), refresh=True)
        while not report.board.finished:
            time.sleep(REDRAW_S)
            report = _look_again(look, report)
            live.update(draw(report.board, report.notes, console.width), refresh=True)
    return report


def _lines(look: "Callable[[], Report]") -> "Report":
    from producer.status_table import facts

    report = look()
    click.echo(line("run", {"id": report.board.run_id, "output_dir": report.board.output_dir}))
    noted: set[str] = set()
    alarmed: tuple[str, ...] = ()
    shown_at = 0.0
    while True:
        now = time.monotonic()
        if report.board.finished or now - shown_at >= LINE_EVERY_S:
            shown_at = now
            state = "finished" if report.board.finished else "running"
            click.echo(line("watch", {"state": state, **facts(report.board)}))
        for note in report.notes:
            if _without_numbers(note) not in noted:
                click.echo(line("note", {"says": note}))
        noted = set(map(_without_numbers, report.notes))
        checks = report.board.checks
        alarms = tuple(map(str, checks.alarms)) if checks else ()
        for alarm in alarms:
            if alarm not in alarmed:
                click.echo(line("alarm", {"says": alarm}))
        alarmed = alarms
        if report.board.finished:
            return report
        time.sleep(REDRAW_S)
        report = _look_again(look, report)


def _without_numbers(note: str) -> str:
    """What makes a note another one; how long something lasts and how many wait do not."""
    return re.sub(r"\b\d[\d ]*(s|min|h|wait)\b", "", note)


def _look_again(look: "Callable[[], Report]", before: "Report") -> "Report":
    """The next report; the one before when the run is out of sight for a moment (Redis back, but empty)."""
    try:
        return look()
    except UnavailableError:
        return before


@click.command("watch")
@options.redis_url
@options.run_dir
def command(redis_url: str | None, output_dir: Path | None) -> int:
    """Show how far the run is until it is finished.

    Ends with status 0, or 1 when samples failed. Ctrl-C ends the watching, not the run.
    """
    say("looking for the run")
    return follow(redis_url or load_config().redis_url, output_dir)
