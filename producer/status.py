"""`producer status`: once, how far the run is, or what has failed, as a table or as JSON."""

import json
from pathlib import Path

import click

from producer import options
from workers.config import load_config


@click.command("status")
@options.redis_url
@options.run_dir
@options.flag("--failed", is_flag=True, help="List the dead letters instead, counted by code first.")
@options.as_json
def command(redis_url: str | None, output_dir: Path | None, failed: bool, as_json: bool) -> int:
    """Show once how far the run is.

    From the figures in Redis; from the store alone when Redis does not answer, and it says so.
    Dead letters are always the store's.
    """
    url = redis_url or load_config().redis_url
    if failed:
        from producer.failed import dead_letters, find_run, listing

        click.echo(listing(dead_letters(find_run(url, output_dir).folder), as_json=as_json))
        return 0
    from producer.run_report import look

    report = look(url, output_dir)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
        return 0
    from producer.status_table import board_console, draw

    console = board_console()
    console.print(draw(report.board, report.notes, console.width))
    return 0
