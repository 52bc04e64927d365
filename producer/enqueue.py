"""`producer enqueue`: a manifest's prompts into the store, the run into Redis, the first window out.

This file is the order of the steps and what is said of each; the steps themselves are elsewhere
(`target.py`, `queueing.py`, `datasets/preparing.py`, `datasets/reading.py`). Everything that can be
wrong is looked at before the first row is read. A kill between any two steps is made up for by the
same command.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from producer import options
from producer.datasets.manifest import Dataset, Manifest, caps_of, choose, find_manifest
from producer.talk import is_terminal, progress, say
from producer.words import count, size
from storage.errors import UsageError
from storage.run import read_run
from storage.settings import DatasetSettings, changing_settings, write_settings
from workers.config import Config, load_config

if TYPE_CHECKING:
    from producer.datasets.preparing import Prepared
    from producer.datasets.prompts import Batch, Limits
    from producer.datasets.reading import Stored
    from producer.datasets.template import Template
    from producer.queueing import Queue
    from producer.servers import Servers
    from producer.target import Target
    from storage.store import Store

MUCH_BYTES = 2_000_000_000
"""Of a source, whose digest is said to take a while."""


@click.command("enqueue")
@options.which_prompts
@options.output_dir
@options.redis_url
@options.which_model
@options.how_run
@options.flag("--no-watch", is_flag=True, help="Return after the first window, on a terminal too.")
@click.pass_context
def command(ctx: click.Context, /, **flags: Any) -> int:
    """Store a manifest's prompts and queue them for generation and capture.

    Run again it goes on: what is stored is skipped, a raised cap adds the rest. What no flag says
    is taken from the run that is already in the folder.
    """
    from producer.cli import eyas_version
    from producer.queueing import Queue

    output: Path = flags["output_dir"].absolute()
    said = options.said(ctx)
    say(f"eyas {eyas_version()} · run in {output}")
    manifest = find_manifest(flags["manifest"])
    datasets = choose(manifest, flags["partition"])
    say(_reads(manifest, datasets))
    config = load_config()
    redis_url = flags["redis_url"] or config.redis_url
    queue = Queue(config, redis_url)
    store, nothing = _enqueue(datasets, output, queue, config, flags, said)
    failed = _watch(queue, store) if is_terminal() and not flags["no_watch"] else 0
    if nothing:
        raise UsageError(
            f"no prompt could be made of {', '.join(nothing)}",
            code="dataset.nothing",
            hint="see above why rows were dropped; `producer plan` shows it without queueing",
        )
    return failed


def _enqueue(
    datasets: Sequence[Dataset],
    output: Path,
    queue: "Queue",
    config: Config,
    flags: dict[str, Any],
    said: dict[str, Any],
) -> tuple["Store", list[str]]:
    """All of it; the store, and the datasets that gave no prompt."""
    from producer.datasets.preparing import check_template, prepare
    from producer.datasets.reading import enough
    from producer.datasets.sources import find_files
    from producer.run_settings import asked_of, settings_after, settings_before
    from producer.servers import addresses, ask_servers, check_servers
    from producer.target import find_target
    from storage.store import Store

    for dataset in datasets:
        source_bytes = sum(file.stat().st_size for file in find_files(dataset.source, dataset.folder))
        if source_bytes > MUCH_BYTES:
            say(f"{dataset.name}: {size(source_bytes)} to compare with what is stored, a second a gigabyte")
    run = read_run(output)
    before = settings_before(output) if run else None
    urls, capture_urls = addresses(said, before)
    servers = ask_servers(urls, capture_urls, config.server_api_key)
    _say_servers(servers)
    target, template = find_target(asked_of(flags, said), servers, run.spec if run else None, before)
    settings = settings_after(flags, said, before, target, urls, capture_urls)
    check_servers(servers, target.spec, settings)
    known = Store.open(output) if run else None
    prepared = [prepare(one, known.dataset_spec(one.name) if known else None) for one in datasets]
    limits = {one.dataset.name: _limits(one.dataset, flags, target) for one in prepared}
    unread = {one.dataset.name for one in prepared if not enough(known, one, limits[one.dataset.name])}
    for one in prepared:
        if one.dataset.name in unread:
            check_template(one, template())
    queue.check_free(output)
    store = Store.create(output, target.spec)
    for one in prepared:
        store.begin_dataset(one.spec)
    caps = {
        name: DatasetSettings(max_samples=one.max_prompts, max_tokens=one.max_tokens)
        for name, one in limits.items()
    }
    with changing_settings(output):
        # read again: another `enqueue` may have added its datasets since
        now = settings_before(output)
        settings = settings_after(flags, said, now, target, urls, capture_urls)
        settings = replace(settings, datasets={**settings.datasets, **caps})
        queue.claim(store, settings)
        queue.agree(store, {**servers.generating, **servers.capturing})
        write_settings(output, settings)
    for facts in [*servers.generating.values(), *servers.capturing.values()]:
        store.write_facts(facts.facts_id, facts.to_json())
    with queue.feeding(store):
        for one in prepared:
            name = one.dataset.name
            if name in unread:
                _read(store, one, template(), limits[name], queue)
            else:
                say(f"{name}: {count(store.reading_state(name).count)} tokenized, skipped")
    nothing = [name for name in limits if not store.reading_state(name).count]
    if queue.feed(store, settings):
        queue.say_who_listens([one.lane for one in prepared], settings)
    return store, nothing


def _limits(dataset: Dataset, flags: dict[str, Any], target: "Target") -> "Limits":
    from producer.datasets.prompts import Limits

    caps = caps_of(dataset, max_samples=flags["max_samples"], max_tokens=flags["max_tokens"])
    return Limits(
        vocab_size=target.spec.vocab_size,
        max_input_tokens=target.max_input_tokens,
        max_prompts=caps.max_samples,
        max_tokens=caps.max_tokens,
    )


def _read(store: "Store", one: "Prepared", template: "Template", limits: "Limits", queue: "Queue") -> None:
    """Read the dataset on, as far as its caps want."""
    from producer.datasets.reading import read_into
    from producer.datasets.skipped import SkippedRows

    name = one.dataset.name
    skipped = SkippedRows(name)
    stored_before = store.reading_state(name).count
    wanted = None if limits.max_prompts is None else limits.max_prompts - stored_before
    with progress("tokenize", total=wanted, dataset=name) as bar:
        dropped = done = 0

        def show(batch: "Batch") -> None:
            nonlocal dropped, done
            dropped += sum(batch.dropped.values())
            done += len(batch.prompts)
            bar.update(
                done, total=done if batch.complete else None, **({"dropped": dropped} if dropped else {})
            )
            skipped.show(batch.skipped)
            queue.wake()

        stored = read_into(store, one, template, limits, progress=show)
    say(f"{name}: {_counted(stored)}")


def _counted(stored: "Stored") -> str:
    text = f"{count(stored.new)} new prompts, {count(stored.prompts)} in all, {count(stored.tokens)} tokens"
    if stored.dropped:
        reasons = ", ".join(f"{reason} {count(rows)}" for reason, rows in sorted(stored.dropped.items()))
        text += f"; {count(sum(stored.dropped.values()))} rows dropped ({reasons})"
    return text


def _reads(manifest: Manifest, datasets: Sequence[Dataset]) -> str:
    names = ", ".join(dataset.name for dataset in datasets)
    if manifest.bundled:
        return f"no manifest named and no datasets.toml here: taking the bundled prompts ({names})"
    return f"manifest {manifest.path}: {names}"


def _say_servers(servers: "Servers") -> None:
    for url, facts in {**servers.generating, **servers.capturing}.items():
        say(f"{url} serves {facts.model} ({facts.says()})")
    for why in servers.away.values():
        say(f"warning: {why}; it is used when it answers")


def _watch(queue: "Queue", store: "Store") -> int:
    """Show the run until it is finished or Ctrl-C; 1 when it finished with failures."""
    from producer.watch import follow

    say("Ctrl-C detaches; the run goes on, and `producer watch` shows it again")
    try:
        with queue.feeding(store):
            return follow(queue.url, store.path)
    except KeyboardInterrupt:
        say("\ndetached; `producer watch` shows the run again")
        return 0
