"""`producer plan`: what a manifest would give, before anything is queued.

Reads and tokenizes like `enqueue`, keeps only counts, writes nothing and asks no Redis. A server is
asked only when neither `--model` nor a run in the folder says which model.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from producer import options
from producer.datasets.manifest import Dataset, caps_of, choose, find_manifest
from producer.talk import progress, say
from storage.run import CaptureSpec, read_run

if TYPE_CHECKING:
    from producer.datasets.model_folder import ModelFolder
    from producer.datasets.preparing import Prepared
    from producer.datasets.prompts import Limits
    from producer.datasets.template import Template
    from producer.plan_report import DatasetPlan


@click.command("plan")
@options.which_prompts
@options.output_dir
@options.which_model
@options.flag(
    "--response-tokens",
    type=options.AT_LEAST_ONE,
    default=None,
    show_default="prompts alone",
    metavar="N",
    help="Tokens you expect of a response on average, to be counted in.",
)
@options.as_json
@click.pass_context
def command(ctx: click.Context, /, **flags: Any) -> int:
    """Count prompts, tokens and bytes of a manifest; queue nothing.

    Needs no Redis, and a server only where `--model` is not given.
    """
    say("counting; nothing is queued")
    manifest = find_manifest(flags["manifest"])
    datasets = choose(manifest, flags["partition"])
    folder, captures, limits = _model(flags, options.said(ctx))
    plans = _plans(datasets, folder, limits, flags)
    from producer.plan_report import as_json, as_text

    if flags["as_json"]:
        where = {"manifest": str(manifest.path), "bundled": manifest.bundled, "model": folder.model}
        click.echo(json.dumps(where | as_json(plans, captures, flags["response_tokens"]), indent=2))
    else:
        click.echo(as_text(plans, captures, flags["response_tokens"]))
    return 0


def _model(
    flags: Mapping[str, Any], said: Mapping[str, Any]
) -> tuple["ModelFolder", Sequence[CaptureSpec], "Limits"]:
    """The model's folder, what may be captured of it, and what a prompt has to keep to."""
    from producer.captures import NAMES, check_capture, resolve_capture, sizes_of
    from producer.datasets.model_folder import find_model
    from producer.datasets.prompts import Limits
    from producer.run_settings import settings_before
    from producer.servers import addresses, ask_servers, require_one
    from producer.target import max_input_tokens, model_name
    from storage.errors import UnsuitableError
    from workers.config import load_config

    check_capture(flags["capture"])
    output = flags["output_dir"].absolute()
    run = read_run(output)
    settings = settings_before(output) if run is not None else None
    servers = None
    if flags["model"] is not None:
        model = model_name(flags["model"])
    elif run is not None:
        model = run.spec.model
    else:
        urls, _ = addresses(said)
        servers = ask_servers(urls, urls, load_config().server_api_key)
        model = require_one(servers).model
    folder = find_model(model)
    facts = servers.any if servers is not None else None
    sizes = sizes_of(folder.config(), facts)
    captures = []
    for name in dict.fromkeys([flags["capture"], *NAMES]):
        try:
            captures.append(resolve_capture(name, sizes, facts))
        except UnsuitableError:  # a model whose sizes nobody knows still has tokens to count
            continue
    most = settings.max_input_tokens if settings else max_input_tokens(servers, folder)
    return folder, captures, Limits(vocab_size=2**31 - 1, max_input_tokens=most)


def _plans(
    datasets: Sequence[Dataset], folder: "ModelFolder", limits: "Limits", flags: Mapping[str, Any]
) -> "list[DatasetPlan]":
    from dataclasses import replace

    from producer.datasets.preparing import check_template, prepare
    from producer.datasets.template import Template

    prepared = [prepare(dataset) for dataset in datasets]
    template = Template(folder, trust_remote_code=flags["trust_remote_code"])
    plans = []
    for one in prepared:
        check_template(one, template)
    for one in prepared:
        caps = caps_of(one.dataset, max_samples=flags["max_samples"], max_tokens=flags["max_tokens"])
        asked = replace(
            limits,
            vocab_size=template.vocab_size,
            max_prompts=caps.max_samples,
            max_tokens=caps.max_tokens,
        )
        plans.append(_plan(one, template, asked))
    return plans


def _plan(prepared: "Prepared", template: "Template", limits: "Limits") -> "DatasetPlan":
    import numpy as np

    from producer.datasets.occurrences import Occurrences
    from producer.datasets.prompts import make_prompts
    from producer.datasets.skipped import SkippedRows
    from producer.datasets.sources import read_rows
    from producer.plan_report import DatasetPlan
    from workers.broker.queues import Lane
    from workers.feeder.orders import lanes_of

    name = prepared.dataset.name
    counts = [np.empty(0, np.int32)]
    dropped: Counter[str] = Counter()
    whole = False
    skipped = SkippedRows(name)
    with progress("plan", total=limits.max_prompts, dataset=name) as bar:
        for batch in make_prompts(
            read_rows(prepared.files, columns=prepared.shape.columns),
            dataset=name,
            shape=prepared.shape,
            template=template,
            limits=limits,
            seen=Occurrences(name),
        ):
            counts.append(np.array([prompt.tokens.size for prompt in batch.prompts], np.int32))
            dropped.update(batch.dropped)
            whole = batch.complete
            bar.advance(len(batch.prompts), **({"dropped": dropped.total()} if dropped else {}))
            skipped.show(batch.skipped)
    tokens = np.concatenate(counts)
    lanes = np.bincount(lanes_of(prepared.lane.value, tokens), minlength=len(Lane))
    return DatasetPlan(
        name=name,
        form=prepared.shape.form.value,
        column=prepared.shape.column,
        tokens=tokens,
        lanes={lane.value: int(count) for lane, count in zip(Lane, lanes, strict=True) if count},
        dropped=dict(dropped),
        whole=whole,
    )
