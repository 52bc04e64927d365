"""What the page shows of one look: each figure where it belongs, and in a word what is wrong."""

import dataclasses
import json

import pytest

from tests.workers.flower.looks import BOARD, CARRIED, DATASET, LOOK, NOW, ONE, PROCESSES, TWO, changed
from workers.flower.snapshot import Look, snapshot


def test_each_figure_is_the_boards_or_the_processes() -> None:
    shown = snapshot(LOOK, NOW)
    totals = shown["totals"]
    assert (totals["done"], totals["wanted"], totals["tokens"]) == (80, 200, 13_000)
    assert (totals["output_per_s"], totals["samples_per_s"], totals["left_s"]) == (812.5, 9.75, 90.0)
    assert totals["truncated_share"] == 8 / 100
    assert (totals["wasted"], totals["stored_bytes"], totals["disk_free_bytes"]) == (3, 123_456, 500)
    assert (totals["output_tokens"], totals["prompt_tokens"], totals["captured_tokens"]) == (
        10_000,
        3000,
        10_400,
    )
    assert shown["dead_letters"] == [{"code": "server.refused", "count": 2, "datasets": {"B2": 2}}]
    assert shown["datasets"][0]["share"] == 80 / 200
    (sink,) = shown["sinks"]
    assert (sink["waiting"], sink["spool_bytes"], sink["spool_oldest_s"]) == (5 + 4, 4096, 12)


def test_checks_are_counted_and_their_alarms_are_sentences() -> None:
    checks = snapshot(LOOK, NOW)["checks"]
    assert (checks["samples"], checks["alarmed"]) == (12, 1)
    (alarm,) = checks["alarms"]
    assert "its rows differ" in alarm
    assert "the limit is 0.1" in alarm
    unchecked = changed(board=dataclasses.replace(BOARD, checks=None))
    assert snapshot(unchecked, NOW)["checks"] is None


def test_calls_in_flight_are_added_up_for_each_lane_at_each_server() -> None:
    lanes = {lane["name"]: lane for lane in snapshot(LOOK, NOW)["lanes"]}
    assert lanes["short"]["servers"] == [
        {"url": ONE, "limit": 40, "in_flight": 30},
        {"url": TWO, "limit": 40, "in_flight": 0},
    ]
    assert lanes["capture"]["servers"] == [{"url": ONE, "limit": 8, "in_flight": 3}]
    assert lanes["short"]["waiting"] == 9  # of the queue now, not of the board a second ago


def test_a_server_shows_its_load_and_facts_or_that_nobody_knows() -> None:
    one, two = snapshot(LOOK, NOW)["servers"]
    assert (one["state"], one["kv_used"], one["running"], one["queued"]) == ("up", 0.875, 31, 2)
    facts = dict(one["facts"])
    assert (facts["SGLang"], facts["KV cache"], facts["ranks"]) == ("0.5.23", "bfloat16", "tp 8")
    assert (two["state"], two["reason"], two["kv_used"], two["facts"]) == ("away", "refused", None, [])


@pytest.mark.parametrize(
    ("look", "state", "says"),
    [
        (Look(), "away", "Redis does not answer"),
        (Look(answers=True), "none", "producer enqueue"),
        (Look(answers=True, carried=CARRIED), "waiting", "producer up"),
        (changed(board=dataclasses.replace(BOARD, at=NOW - 100)), "stalled", "producer up"),
        (changed(processes=PROCESSES[-1:]), "idle", "producer up"),
        (LOOK, "running", ""),
        (changed(board=dataclasses.replace(BOARD, finished=True, at=NOW - 100)), "finished", "outcome"),
    ],
)
def test_what_is_wrong_is_one_word_and_a_sentence(look: Look, state: str, says: str) -> None:
    shown = snapshot(look, NOW)
    assert shown["state"] == state
    assert says in shown["says"]
    json.dumps(shown, allow_nan=False)


def test_a_cap_on_tokens_counts_as_progress() -> None:
    capped = dataclasses.replace(DATASET, max_tokens=14_000)
    shown = snapshot(changed(board=dataclasses.replace(BOARD, datasets=(capped,))), NOW)
    assert shown["datasets"][0]["share"] == 13_000 / 14_000


def test_nothing_a_server_says_beside_its_facts_is_shown() -> None:
    look = changed(facts={"f1": LOOK.facts["f1"] | {"api_key": "secret-key", "launch_command": "secret-key"}})
    assert "secret-key" not in json.dumps(snapshot(look, NOW))
