"""The command `producer`: its subcommands, imported one by one, and the settings file under their flags.

No subcommand's work is here. A module is imported only when its command runs, so that the first
words come within a second whatever the other commands need.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from storage.cli_errors import run_command
from storage.suggest import did_you_mean
from workers.config import read_toml

COMMANDS = {
    "plan": "Count prompts, tokens and bytes of a manifest; queue nothing.",
    "enqueue": "Store a manifest's prompts and queue them for generation and capture.",
    "status": "Show once how far the run is.",
    "watch": "Show how far the run is until it is finished.",
    "retry": "Try dead letters once more.",
    "up": "Start Redis, workers and a sink on this machine.",
    "down": "Stop what `up` started.",
    "demo": "Run the whole job on this machine with a tiny model and verify the store.",
}
"""Name → line of help. The command is `command` in `producer/<name>.py`."""


class Commands(click.Group):
    """Subcommands found by name; an unknown one is answered with the nearest that exists."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; None for a name that is none."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"producer.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with a suggestion."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"unknown command `{name}`; {did_you_mean(name, COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of help, without importing a single command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"eyas {eyas_version()}")
        ctx.exit()


def eyas_version() -> str:
    """The installed distribution's version."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("eyas")
    except PackageNotFoundError:
        return "unknown (not installed)"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Say which Eyas."
)
@click.pass_context
def producer(ctx: click.Context) -> None:
    """Turn prompt datasets into the training data of an EAGLE-3 drafter.

    Settings: flag, then EYAS_* variable, then `eyas.toml` in the working folder, then default.
    """
    ctx.default_map = defaults_from(Path("eyas.toml"))


def defaults_from(path: Path) -> dict[str, Any]:
    """The settings file as click's `default_map`: each command takes the keys it has a flag for.

    Raises `UsageError` for a key that no command knows.
    """
    values = read_toml(path)
    for name in ("server_url", "capture_server_url"):
        if isinstance(values.get(name), str):
            values[name] = values[name].split()
    return dict.fromkeys(COMMANDS, values) if values else {}


def main() -> None:
    """The entry point `producer`."""
    sys.exit(run_command(producer, "producer"))


if __name__ == "__main__":
    main()
