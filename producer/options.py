"""Flags that several commands share, each with its `EYAS_*` variable and its default in `--help`.

What a flag means is said by its help; what is done with it, by the command.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from storage.json_records import is_count
from storage.run import DEFAULT_OUTPUT_DIR, StatesMode
from storage.settings import CHECK_EVERY

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

DEFAULT_SERVER_URL = "http://127.0.0.1:30000"
"""SGLang's own port."""


def flag(
    name: str,
    *also: str,
    help: str,  # noqa: A002
    **settings: Any,
) -> Callable[[Decorated], Decorated]:
    """An option `--name` with its variable `EYAS_NAME`, both and the default shown in `--help`."""
    variable = "EYAS_" + name.partition("/")[0].removeprefix("--").replace("-", "_").upper()
    settings = {"show_default": True, "show_envvar": True} | settings
    return click.option(name, *also, envvar=variable, help=help, **settings)


def together(*decorators: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Several options as one decorator, shown in this order."""

    def decorate(command: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def said(ctx: click.Context) -> dict[str, Any]:
    """The parameters that somebody gave a value: by flag, variable or settings file."""
    chosen = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)
    return {name: value for name, value in ctx.params.items() if ctx.get_parameter_source(name) in chosen}


class Count(click.IntRange):
    """A whole number of at least 1; anything else is answered with what to do instead."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number. Raises click's `BadParameter`."""
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = 0
        if number < 1 or isinstance(value, (bool, float)):
            hint = "; leave it out for no cap" if param is not None and param.default is None else ""
            self.fail(f"`{value}` is not a whole number of at least 1{hint}", param, ctx)
        if not is_count(number):
            self.fail(f"`{value}` is more than can be counted; leave it out for no cap", param, ctx)
        return number


class Finite(click.FloatRange):
    """A number in its range; `nan` and `inf` are in none, though they compare as if they were."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Raises click's `BadParameter`."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"`{value}` is not a finite number", param, ctx)
        return number


class TopK(click.IntRange):
    """Of how many tokens to sample: servers refuse 0, which would end every prompt of the run."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number. Raises click's `BadParameter`."""
        number = int(super().convert(value, param, ctx))
        if number == 0:
            self.fail("`0` leaves no token to sample; -1 takes all", param, ctx)
        return number


AT_LEAST_ONE = Count(min=1)

output_dir = flag(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_OUTPUT_DIR,
    metavar="DIR",
    help="The run's folder.",
)
redis_url = flag(
    "--redis-url",
    default=None,
    show_default="that of `producer up`, else redis://127.0.0.1:6379/0",
    metavar="URL",
    help="The Redis that carries the run.",
)
run_dir = flag(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    show_default="that of the run in Redis",
    metavar="DIR",
    help="The run's folder.",
)
as_json = flag("--json", "as_json", is_flag=True, help="Report as JSON on stdout.")

which_prompts = together(
    flag(
        "--manifest",
        type=click.Path(path_type=Path),
        default=None,
        show_default="datasets.toml if there, else the bundled prompts",
        metavar="FILE",
        help="Datasets to read: a TOML file of [[dataset]] tables, or one prompt file itself.",
    ),
    flag(
        "--partition",
        default="all",
        metavar="NAMES",
        help="Datasets of the manifest to take: `all`, or names with commas between.",
    ),
    flag(
        "--max-samples",
        type=AT_LEAST_ONE,
        default=None,
        show_default="no cap",
        metavar="N",
        help="Of each dataset, the first N eligible prompts. A dataset's own cap holds if lower.",
    ),
    flag(
        "--max-tokens",
        type=AT_LEAST_ONE,
        default=None,
        show_default="no cap",
        metavar="N",
        help="Of each dataset, prompt and response tokens stored. A dataset's own cap holds if lower.",
    ),
)

which_model = together(
    flag(
        "--server-url",
        "server_url",
        multiple=True,
        default=None,
        show_default=DEFAULT_SERVER_URL,
        metavar="URL",
        help="An SGLang server that generates. May be given again.",
    ),
    flag(
        "--model",
        default=None,
        show_default="what the server loaded",
        metavar="ID",
        help="Hub id or folder of the target, for its tokenizer and chat template.",
    ),
    flag(
        "--capture",
        default="eagle3",
        metavar="NAME",
        help="States to keep: eagle3 (three layers and the final), aux (three), final, or indices 2,16,29.",
    ),
    flag(
        "--trust-remote-code",
        is_flag=True,
        help="Run the tokenizer code that comes with the model.",
    ),
    flag(
        "--short-max-tokens",
        type=AT_LEAST_ONE,
        default=10240,
        metavar="N",
        help="Most response tokens, lane short.",
    ),
    flag(
        "--long-max-tokens",
        type=AT_LEAST_ONE,
        default=16384,
        metavar="N",
        help="Most response tokens, lane long.",
    ),
)

how_run = together(
    flag(
        "--capture-server-url",
        "capture_server_url",
        multiple=True,
        default=None,
        show_default="the generating servers",
        metavar="URL",
        help="An SGLang server that captures. May be given again.",
    ),
    flag(
        "--states",
        type=click.Choice([mode.value for mode in StatesMode]),
        default=StatesMode.REPLAY.value,
        help="When states are taken: after generating, with it, or not now.",
    ),
    flag(
        "--short-concurrency",
        type=AT_LEAST_ONE,
        default=150,
        metavar="N",
        help="Calls in flight per server, lane short.",
    ),
    flag(
        "--long-concurrency",
        type=AT_LEAST_ONE,
        default=32,
        metavar="N",
        help="Calls in flight per server, lane long.",
    ),
    flag(
        "--capture-concurrency",
        type=AT_LEAST_ONE,
        default=64,
        metavar="N",
        help="Calls in flight per server, lane capture.",
    ),
    flag(
        "--check-every",
        type=click.IntRange(min=0),
        default=CHECK_EVERY,
        metavar="N",
        help="Capture one sample in N a second time and check it, and each server's first; 0 for none.",
    ),
    flag("--allow-quantized-kv", is_flag=True, help="Accept a server whose KV cache is quantized."),
    flag("--temperature", type=Finite(min=0.0), default=1.0, help="Sampling temperature."),
    flag(
        "--top-p",
        type=Finite(min=0.0, max=1.0, min_open=True),
        default=1.0,
        help="Sample among the likeliest tokens of this mass.",
    ),
    flag("--top-k", type=TopK(min=-1), default=-1, help="Sample among so many; -1 for all."),
    flag(
        "--seed",
        type=click.IntRange(min=0, max=2**32 - 1),
        default=0,
        help="Mixed with each prompt's id into the request's seed.",
    ),
)
