"""`producer retry`: dead letters are tried once more, while the run goes on or after it has finished.

Writes down what is asked for in the run's settings; the feeder, which follows them, publishes it.
Which dead letters a request means, and that it means none of its own outcome, is in
`storage/retries.py`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from producer import options
from producer.talk import say
from producer.words import count
from storage.errors import UsageError
from storage.suggest import did_you_mean
from workers.config import load_config

if TYPE_CHECKING:
    from producer.failed import Found
    from storage.retries import Retry
    from storage.standing import Standing

FEWEST_HEX = 6
"""Digits of an id that must be given at least."""


@click.command("retry")
@options.flag("--code", "codes", multiple=True, metavar="CODE", help="Only dead letters of this code.")
@options.flag("--dataset", "datasets", multiple=True, metavar="NAME", help="Only those of this dataset.")
@options.flag("--id", "ids", multiple=True, metavar="ID", help="Only this one, by its id or the beginning.")
@options.redis_url
@options.run_dir
@options.as_json
def command(
    codes: tuple[str, ...],
    datasets: tuple[str, ...],
    ids: tuple[str, ...],
    redis_url: str | None,
    output_dir: Path | None,
    as_json: bool,
) -> int:
    """Try dead letters once more: all, or those that fit every flag given. Flags may be given again.

    `producer status --failed` lists them. A new outcome replaces the old; what fails again is a
    dead letter again.
    """
    say("looking for dead letters")
    from producer.failed import counts, find_run

    url = redis_url or load_config().redis_url
    found = find_run(url, output_dir)
    chosen = ask_again(found.folder, codes, datasets, ids)
    again = [one for one in chosen if not one.again and not one.capped]
    if again:
        _wake(found, url)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "again": len(again),
                    "codes": counts(again),
                    "asked_already": sum(one.again for one in chosen),
                    "capped": sum(one.capped and not one.again for one in chosen),
                }
            )
        )
        return 0
    click.echo(_said(chosen, again))
    if again:
        _say_who_tries(found)
    return 0


def ask_again(
    folder: Path, codes: Sequence[str], datasets: Sequence[str], ids: Sequence[str]
) -> list["Standing"]:
    """The dead letters that fit; those among them that nobody had asked for before are asked for now.

    Raises `UsageError` for a code, dataset or id that none has.
    """
    from producer.failed import dead_letters, open_run
    from storage.retries import Retry, last_number
    from storage.settings import changing_settings, read_settings, write_settings

    open_run(folder)  # before its settings are locked: an error that says what is not there
    with changing_settings(folder):
        letters = dead_letters(folder)
        if not letters:
            return []
        wanted = Retry(
            number=1,
            codes=_known("--code", codes, {one.failure.code for one in letters}),
            datasets=_known("--dataset", datasets, {one.failure.dataset for one in letters}),
            ids=_whole_ids(ids, [one.failure.id.hex() for one in letters]),
        )
        chosen = [one for one in letters if replace(wanted, number=one.failure.retry + 1).fits(one.failure)]
        settings = read_settings(folder)
        # Another request for what is asked for already would try it twice.
        if any(not one.again and not one.capped for one in chosen):
            request = _request(settings.retries, wanted, chosen)
            retry = replace(request, number=last_number(settings.retries) + 1)
            write_settings(folder, replace(settings, retries=(*settings.retries, retry)))
        return chosen


def _request(before: Sequence["Retry"], wanted: "Retry", chosen: Sequence["Standing"]) -> "Retry":
    """What is written down. Of dead letters some of which are asked for already, only the others."""
    if any(one.again for one in chosen):
        return replace(wanted, ids=tuple(one.failure.id.hex() for one in chosen if not one.again))
    return wanted


def _known(flag: str, given: Iterable[str], there: set[str]) -> tuple[str, ...]:
    for one in given:
        if one not in there:
            raise UsageError(
                f"no dead letter has `{flag} {one}`",
                code="retry.unknown",
                hint=did_you_mean(one, sorted(there)),
            )
    return tuple(dict.fromkeys(given))


def _whole_ids(given: Iterable[str], there: Sequence[str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for one in given:
        fits = {each for each in there if each.startswith(one.lower())} if len(one) >= FEWEST_HEX else set()
        if len(fits) != 1:
            raise UsageError(
                f"{len(fits) or 'no'} dead letters have an id that begins with `{one}`",
                code="retry.unknown",
                hint=f"`producer status --failed` lists them; give at least {FEWEST_HEX} digits",
            )
        found[fits.pop()] = None
    return tuple(found)


def _said(chosen: Sequence["Standing"], again: Sequence["Standing"]) -> str:
    from producer.failed import counts

    if not chosen:
        return "nothing has failed"
    said = []
    if again:
        by_code = ", ".join(f"{code} {count(number)}" for code, number in counts(again).items())
        said.append(f"{count(len(again))} will be tried again ({by_code})")
    if already := sum(one.again for one in chosen):
        said.append(f"{count(already)} asked for already")
    if capped := sum(one.capped and not one.again for one in chosen):
        said.append(f"{count(capped)} not wanted: their dataset has reached its `max_tokens`")
    return "; ".join(said)


def _wake(found: "Found", url: str) -> None:
    if not found.carried:
        return
    from workers.broker.connection import connect
    from workers.feeder.wake import wake_feeder

    with connect(url) as redis:
        wake_feeder(redis)


def _say_who_tries(found: "Found") -> None:
    if found.carried:
        say("`producer watch` shows them; a sink or `producer enqueue` must be up")
    elif found.other:
        say(
            f"this Redis carries the run of {found.other}: when that has finished, `producer enqueue` goes on"
        )
    else:
        say("no Redis carries this run now: `producer enqueue` goes on with it")
