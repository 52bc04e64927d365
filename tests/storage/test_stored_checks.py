"""Checks of samples: kept by segments whatever becomes of these, summed up, and never in a sample's way."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from store_making import CAPTURE, add_all, make_prompts, make_response, make_states, new_store, whole_store

import storage
from storage.catalog import Catalog
from storage.check_log import CheckLog, read_checks
from storage.checks import MAX_CHARACTERS, MAX_TEXTS, bounded, read_check, summarize
from storage.compact import compact
from storage.progress import Progress
from storage.sample import Alarm, Check, States
from storage.spool import Spool
from storage.store import Store

GOOD = Check(
    server="http://a:30000",
    rows=20,
    worst_error=0.004,
    typical_error=0.002,
    worst_cosine=0.9999,
    rms=1.001,
    positions=19,
    mean_logprob=-1.25,
    head_error=0.01,
)
ALARM = Alarm(code="states.row", value=1.4, limit=0.5, message="row 3 of hidden state 5")
BAD = replace(GOOD, server="http://b:30000", worst_error=1.4, worst_cosine=0.1, alarms=(ALARM,))
SKIPPED = Check(server="http://a:30000", skipped=("second capture: server.busy",))


def stored(tmp_path: Path, checks: list[Check | None]) -> tuple[Store, list[States]]:
    """A store of so many samples, each in a segment of its own, with these checks."""
    store, spool = new_store(tmp_path / "out"), Spool(tmp_path / "spool", "node1", 1 << 30)
    prompts = make_prompts(len(checks))
    add_all(store, prompts)
    made = []
    for prompt, check in zip(prompts, checks, strict=True):
        response = make_response(prompt)
        store.commit_responses([response])
        made.append(replace(make_states(response, spool), check=check))
        assert len(store.commit_states(made[-1:], spool).stored) == 1
    return store, made


def catalog_of(store: Store) -> Catalog:
    catalog = Catalog(store.path / "states" / CAPTURE.name)
    catalog.refresh()
    return catalog


def test_a_check_comes_back_from_its_segment_as_it_was(tmp_path: Path) -> None:
    store, made = stored(tmp_path, [GOOD, None, BAD, SKIPPED])
    found = [check for segment in catalog_of(store).segments for check in read_checks(segment)]
    assert found == [
        (states.id.hex(), states.digest.hex(), states.check) for states in made if states.check is not None
    ]


def test_the_samples_of_a_marked_segment_are_read_like_any_other(tmp_path: Path) -> None:
    store, made = stored(tmp_path, [GOOD, BAD])
    samples = storage.open(store.path)
    assert len(samples) == 2
    assert samples.sample(made[1].id.hex()).states.shape == made[1].spool.shape


def test_what_checks_come_to_is_the_worst_of_each_and_every_alarm() -> None:
    summary = summarize([("aa", GOOD), ("bb", BAD), ("cc", SKIPPED)])
    assert (summary.samples, summary.compared, summary.rows, summary.with_head) == (3, 2, 40, 2)
    assert (summary.worst_error, summary.worst_cosine, summary.least_logprob) == (1.4, 0.1, -1.25)
    assert (summary.alarmed, summary.skipped) == (1, SKIPPED.skipped)
    assert str(summary) == (
        "2 samples captured again, worst deviation 1.4, output head within 0.01 nats in 2; 1 with an ALARM"
    )
    (alarm,) = summary.alarms
    for said in ("states.row", "1.4", "0.5", "bb", "http://b:30000", "row 3"):
        assert said in str(alarm)
    assert str(summarize([("aa", GOOD)])).endswith("; no alarm")


def test_a_log_follows_what_is_committed_and_counts_a_sample_once(tmp_path: Path) -> None:
    store, made = stored(tmp_path, [GOOD, None])
    catalog, log = catalog_of(store), CheckLog()
    first = log.follow(catalog)
    assert first is not None
    assert (first.samples, first.alarmed) == (1, 0)
    other = Spool(tmp_path / "spool2", "node2", 1 << 30)
    response = store.response(made[0].id)
    twice = replace(make_states(response, other), check=BAD)
    Store.open(store.path).commit_states([twice], other)
    late = make_response(make_prompts(3)[2])
    store.commit_states([replace(make_states(late, other), check=SKIPPED)], other)
    catalog.refresh()
    then = log.follow(catalog)
    assert then is not None
    assert then.samples == 2
    assert CheckLog().follow(Catalog(store.path / "states" / "none")) is None
    assert log.follow(None) is None


def test_compaction_keeps_every_check(tmp_path: Path) -> None:
    store, _ = stored(tmp_path, [GOOD, None, BAD, None, SKIPPED, GOOD])
    before = CheckLog().follow(catalog_of(store))
    with Progress("merging") as progress:
        compact(store.path, progress)
    catalog = catalog_of(store)
    visible = catalog.visible()
    assert len(visible) < 6
    assert sum(len(list(read_checks(segment))) for segment in visible) == 4
    assert CheckLog().follow(catalog) == before


def test_info_tells_of_checks_in_words_and_as_json(tmp_path: Path) -> None:
    store, made = stored(tmp_path, [GOOD, BAD, SKIPPED])
    command = [sys.executable, "-m", "storage.cli", "info", str(store.path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "checks of eagle3: 2 samples captured again" in said
    assert f"alarm states.row: 1.4, the limit is 0.5; sample {made[1].id.hex()}" in said
    assert "not checked: second capture: server.busy" in said
    found = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True).stdout)
    assert found["checks"]["eagle3"]["alarmed"] == 1
    assert found["checks"]["eagle3"]["alarms"][0]["value"] == 1.4


def test_a_store_without_checks_says_nothing_of_them(tmp_path: Path) -> None:
    whole_store(tmp_path / "out")
    command = [sys.executable, "-m", "storage.cli", "info", str(tmp_path / "out")]
    assert "checks of" not in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True).stdout)
    assert found["checks"] == {}


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        {"server": 3},
        {"server": "a" * (MAX_CHARACTERS + 1)},
        {"server": "a", "worst_error": math.nan},
        {"server": "a", "worst_error": "0.1"},
        {"server": "a", "rows": 1.5},
        {"server": "a", "skipped": ["x"] * 100},
        {"server": "a", "alarms": [{"code": "x"}]},
        {"server": "a", "alarms": [asdict(ALARM) | {"value": math.inf}]},
    ],
)
def test_what_is_no_check_is_refused(content: object) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_check(content)


def test_whatever_a_check_says_it_can_be_read_again() -> None:
    long = "x" * 10_000
    wordy = replace(
        BAD, server=long, skipped=(long,) * 50, alarms=(replace(ALARM, message=long),) * (MAX_TEXTS + 1)
    )
    with pytest.raises(ValueError, match="size"):
        read_check(asdict(wordy))
    kept = read_check(asdict(bounded(wordy)))
    assert (kept.worst_error, kept.alarms[0].code, len(kept.alarms)) == (1.4, "states.row", MAX_TEXTS)


def test_keys_of_a_later_version_are_passed_over() -> None:
    assert read_check(asdict(GOOD) | {"later": 1}) == GOOD
