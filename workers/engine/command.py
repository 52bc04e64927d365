"""The engine's command line: options to `Settings`, then `serving.serve`."""

import asyncio
import functools
from pathlib import Path
from typing import Literal

import click

from workers.config import load_config

option = functools.partial(click.option, show_envvar=True)


@click.command(context_settings={"show_default": True, "auto_envvar_prefix": "EYAS_ENGINE"})
@option("--model", show_default="the bundled one", help="Folder of a LlamaForCausalLM, or `none` for a hash.")
@option("--served-model-name", show_default="the folder", help="Name it answers under.")
@option("--host", default="127.0.0.1")
@option("--port", default=30000, help="0 takes a free one.")
@option(
    "--states",
    type=click.Choice(["spool", "json", "off"]),
    default="spool",
    help="How hidden states are given: as the Eyas plugin does, as a stock server does, or not.",
)
@option("--aux", is_flag=True, help="JSON states are the auxiliary layers' instead of the final one.")
@option("--spool-dir", type=click.Path(path_type=Path), show_default="EYAS_SPOOL_DIR")
@option("--spool-max-gb", type=click.FloatRange(min=0, min_open=True), show_default="EYAS_SPOOL_MAX_GB")
@option("--node", show_default="EYAS_NODE", help="Whose spool it is.")
@option("--context-length", type=click.IntRange(min=16), show_default="the model's")
@option("--slots", type=click.IntRange(min=1), default=128, help="Requests that run at once.")
@option(
    "--max-queued-requests", type=click.IntRange(min=0), show_default="any", help="More waiting get a 503."
)
@option(
    "--mean-tokens",
    type=click.FloatRange(min=0),
    default=64,
    help="Mean length of responses, decided by the prompt; 0 lets the model go on until it stops.",
)
@option("--pace-ttft-ms", type=click.FloatRange(min=0), default=0, help="Least time to the first token.")
@option("--pace-tpot-ms", type=click.FloatRange(min=0), default=0, help="Least time a further token.")
@option("--api-key", show_default="EYAS_SERVER_API_KEY", help="Ask for this bearer token.")
@option("--weight-version", default="default", help="Said of the weights, as SGLang says it.")
@option("--kv-cache-dtype", default="bfloat16", help="Said of the KV cache; changes nothing.")
@click.option("--print-model-dir", is_flag=True, help="Say where the bundled model is, and end.")
def command(
    model: str | None,
    served_model_name: str | None,
    host: str,
    port: int,
    states: Literal["spool", "json", "off"],
    aux: bool,
    spool_dir: Path | None,
    spool_max_gb: float | None,
    node: str | None,
    context_length: int | None,
    slots: int,
    max_queued_requests: int | None,
    mean_tokens: float,
    pace_ttft_ms: float,
    pace_tpot_ms: float,
    api_key: str | None,
    weight_version: str,
    kv_cache_dtype: str,
    print_model_dir: bool,
) -> None:
    """A small Llama in NumPy behind SGLang's HTTP contract, for machines without a GPU."""
    from workers.engine import tiny_model_dir

    if print_model_dir:
        click.echo(tiny_model_dir())
        return
    click.echo(f"engine starting model={model or 'bundled'}", err=True)
    from storage.spool import Spool
    from workers.engine.model_config import read_config
    from workers.engine.serving import serve
    from workers.engine.settings import Settings

    config = load_config()
    hashed = model == "none"
    folder = tiny_model_dir() if model is None or hashed else Path(model).absolute()
    node = node or config.node
    settings = Settings(
        model_path=folder,
        served_name=served_model_name or str(folder),
        host=host,
        port=port,
        states=states,
        aux=aux,
        context_length=context_length or read_config(folder).max_positions,
        slots=slots,
        max_queued=max_queued_requests,
        mean_tokens=mean_tokens,
        pace_ttft_s=pace_ttft_ms / 1000,
        pace_tpot_s=pace_tpot_ms / 1000,
        api_key=api_key or config.server_api_key,
        node=node,
        hashed=hashed,
        weight_version=weight_version,
        kv_cache_dtype=kv_cache_dtype,
    )
    spool = None
    if states == "spool":
        max_bytes = int(spool_max_gb * 1e9) if spool_max_gb else config.spool_max_bytes
        spool = Spool((spool_dir or config.spool_dir).absolute(), node, max_bytes)
    asyncio.run(serve(settings, spool))
