"""`producer enqueue`: a manifest's prompts into the store, the run into Redis, the first window out.

This file is the order of the steps and what is said of each; the steps themselves are elsewhere
(`target.py`, `preparing.py`, `reading.py`, `queueing.py`). Everything that can be wrong is looked
at before the first row is read. A kill between any two steps is made up for by the same command.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from producer import options
from producer.manifest import Dataset, Manifest, choose, find_manifest
from producer.talk import is_terminal, progress, say
from storage.errors import UsageError
from storage.run import StatesMode, read_run
from storage.settings import DatasetSettings, RunSettings, read_settings, write_settings
from workers.config import Config, load_config, read_state

if TYPE_CHECKING:
    from producer.preparing import Prepared
    from producer.prompts import Batch
    from producer.queueing import Queue
    from producer.reading import Stored
    from producer.target import Asked, Servers, Target, TemplateLoader
    from storage.store import Store

SKIPPED_SHOWN = 3
"""Skipped rows named one by one, per dataset; the others are counted."""


@click.command("enqueue")
@options.which_prompts
@options.output_dir
@options.redis_url
@options.which_model
@options.how_run
@click.option("--no-watch", is_flag=True, help="Return after the first window, on a terminal too.")
@click.pass_context
def command(ctx: click.Context, /, **flags: Any) -> int:
    """Store a manifest's prompts and queue them for generation and capture.

    Run again it goes on: what is stored is skipped, a raised cap adds the rest. What no flag says
    is taken from the run that is already in the folder.
    """
    from producer.cli import eyas_version

    output: Path = flags["output_dir"].absolute()
    said = options.said(ctx)
    say(f"eyas {eyas_version()} · run in {output}")
    manifest = find_manifest(flags["manifest"])
    datasets = choose(manifest, flags["partition"])
    say(_reads(manifest, datasets))
    config = load_config()
    redis_url = flags["redis_url"] or config.redis_url
    from producer.queueing import Queue

    queue = Queue(config, redis_url)
    store, nothing = _enqueue(datasets, output, queue, config, flags, said)
    if is_terminal() and not flags["no_watch"]:
        _watch(queue, store)
    if nothing:
        raise UsageError(
            f"no prompt could be made of {', '.join(nothing)}",
            code="dataset.nothing",
            hint="see above why rows were dropped; `producer plan` shows it without queueing",
        )
    return 0


def _enqueue(
    datasets: Sequence[Dataset],
    output: Path,
    queue: "Queue",
    config: Config,
    flags: dict[str, Any],
    said: dict[str, Any],
) -> tuple["Store", list[str]]:
    """All of it; the store, and the datasets that gave no prompt."""
    from producer.preparing import prepare
    from producer.sources import find_files
    from producer.target import ask_servers, check_servers, find_target
    from storage.store import Store

    for dataset in datasets:
        find_files(dataset.source, dataset.folder)
    run = read_run(output)
    before = _settings(output) if run else None
    urls, capture_urls = _urls(said, before)
    servers = ask_servers(urls, capture_urls, config.server_api_key)
    _say_servers(servers)
    target, template = find_target(_asked(flags, said), servers, run.spec if run else None, before)
    settings = _new_settings(said, flags, before, target, urls, capture_urls)
    check_servers(servers, target.spec, settings)
    store = Store.create(output, target.spec)
    prepared = [prepare(dataset, store.dataset_spec(dataset.name)) for dataset in datasets]
    caps = {p.dataset.name: _caps(p.dataset, flags) for p in prepared}
    settings = replace(settings, datasets={**settings.datasets, **caps})
    queue.claim(store, settings)
    for one in prepared:
        store.begin_dataset(one.spec)
    for facts in [*servers.generating.values(), *servers.capturing.values()]:
        store.write_facts(facts.facts_id, facts.to_json())
    write_settings(output, settings)
    nothing = [
        one.dataset.name
        for one in prepared
        if not _read(store, one, target, template, caps[one.dataset.name])
    ]
    queue.feed(store)
    queue.say_who_listens([one.lane for one in prepared], settings)
    return store, nothing


def _read(
    store: "Store",
    one: "Prepared",
    target: "Target",
    template: "TemplateLoader",
    caps: DatasetSettings,
) -> int:
    """Read the dataset on, as far as its caps want; how many prompts the store has of it."""
    from producer.prompts import Limits
    from producer.reading import enough, read_into

    name = one.dataset.name
    limits = Limits(
        vocab_size=target.spec.vocab_size,
        max_input_tokens=target.max_input_tokens,
        max_prompts=caps.max_samples,
        max_tokens=caps.max_tokens,
    )
    if enough(store, one, limits):
        count = store.reading_state(name).count
        say(f"{name}: {count:,} tokenized, skipped")
        return count
    named = 0
    with progress("tokenize", total=caps.max_samples, dataset=name, dropped=0) as bar:
        made = dropped = 0

        def show(batch: "Batch") -> None:
            nonlocal made, dropped, named
            made += len(batch.prompts)
            dropped += sum(batch.dropped.values())
            bar.update(made, dropped=dropped)
            for row in batch.skipped[: SKIPPED_SHOWN - named]:
                named += 1
                say(
                    f"{name}: skipped {row.where}: {row.reason.value}"
                    + (f" ({row.detail})" if row.detail else "")
                )

        stored = read_into(store, one, template(), limits, progress=show)
    say(f"{name}: {_counted(stored)}")
    return stored.prompts


def _counted(stored: "Stored") -> str:
    text = f"{stored.new:,} new prompts, {stored.prompts:,} in all, {stored.tokens:,} tokens"
    if stored.dropped:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(stored.dropped.items()))
        text += f"; {sum(stored.dropped.values()):,} rows dropped ({reasons})"
    return text


def _reads(manifest: Manifest, datasets: Sequence[Dataset]) -> str:
    names = ", ".join(dataset.name for dataset in datasets)
    if manifest.bundled:
        return f"no manifest named and no datasets.toml here: taking the bundled prompts ({names})"
    return f"manifest {manifest.path}: {names}"


def _settings(output: Path) -> RunSettings | None:
    try:
        return read_settings(output)
    except FileNotFoundError:  # killed between the run's first two files
        return None


def _urls(said: dict[str, Any], before: RunSettings | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    from workers.sglang import server_url

    urls = tuple(said.get("server_url", ())) or (before.server_urls if before else ())
    urls = urls or (read_state().get("engine_url") or options.DEFAULT_SERVER_URL,)
    follow = before is None or before.capture_urls == before.server_urls
    capture = tuple(said.get("capture_server_url", ())) or (
        urls if before is None or follow else before.capture_urls
    )
    return tuple(map(server_url, urls)), tuple(map(server_url, capture))


def _asked(flags: dict[str, Any], said: dict[str, Any]) -> "Asked":
    from producer.captures import check_capture
    from producer.target import Asked

    check_capture(flags["capture"])
    names = (
        "model",
        "capture",
        "short_max_tokens",
        "long_max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
    )
    return Asked(
        **{name: said.get(name) for name in names},
        states=StatesMode(said["states"]) if "states" in said else None,
        trust_remote_code=flags["trust_remote_code"],
    )


def _new_settings(
    said: dict[str, Any],
    flags: dict[str, Any],
    before: RunSettings | None,
    target: "Target",
    urls: tuple[str, ...],
    capture_urls: tuple[str, ...],
) -> RunSettings:
    kept = before.concurrency if before else {}
    lanes = ("short", "long", "capture")
    limits = {
        lane: said.get(f"{lane}_concurrency") or kept.get(lane) or flags[f"{lane}_concurrency"]
        for lane in lanes
    }
    return RunSettings(
        server_urls=urls,
        capture_urls=capture_urls,
        concurrency=limits,
        max_input_tokens=target.max_input_tokens,
        states=target.spec.states,
        capture=target.spec.capture,
        allow_quantized_kv=bool(
            said.get("allow_quantized_kv", before.allow_quantized_kv if before else False)
        ),
        datasets=before.datasets if before else {},
    )


def _caps(dataset: Dataset, flags: dict[str, Any]) -> DatasetSettings:
    def lower(own: int | None, asked: int | None) -> int | None:
        return min((cap for cap in (own, asked) if cap is not None), default=None)

    return DatasetSettings(
        max_samples=lower(dataset.max_samples, flags["max_samples"]),
        max_tokens=lower(dataset.max_tokens, flags["max_tokens"]),
    )


def _say_servers(servers: "Servers") -> None:
    for url, facts in {**servers.generating, **servers.capturing}.items():
        say(f"{url} serves {facts.model} (SGLang {facts.sglang}, states: {facts.states})")
    for why in servers.away.values():
        say(f"warning: {why}; it is used when it answers")


def _watch(queue: "Queue", store: "Store") -> None:
    from producer.watch import follow

    say("Ctrl-C detaches; the run goes on, and `producer watch` shows it again")
    try:
        with queue.feeding(store):
            follow(queue.url, store.path)
    except KeyboardInterrupt:
        say("\ndetached; `producer watch` shows the run again")
