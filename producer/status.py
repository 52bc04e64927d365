"""`producer status`: once, how far the run is, as a table or as JSON."""

import json
from pathlib import Path

import click

from producer import options
from workers.config import load_config


@click.command("status")
@options.redis_url
@options.run_dir
@options.as_json
def command(redis_url: str | None, output_dir: Path | None, as_json: bool) -> int:
    """Show once how far the run is.

    From the figures in Redis; from the store alone when Redis does not answer, and it says so.
    """
    from producer.run_report import look

    report = look(redis_url or load_config().redis_url, output_dir)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
        return 0
    from producer.status_table import board_console, draw

    console = board_console()
    console.print(draw(report.board, report.notes, console.width))
    return 0
