"""status and watch over a real store and a real Redis: whom they believe, what they say, how they end."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import redis
from rich.text import Text

from producer import watch
from producer.run_report import Report
from producer.status_table import draw
from storage.checks import summarize
from storage.sample import Alarm, Check
from storage.store import Store
from tests.producer.machine.supervised import until
from tests.producer.stored import DATASET, board, small_store
from workers.board.board import SinkBoard, write_board
from workers.board.processes import ProcessSnapshot, write_process
from workers.runs import claim

NOBODY = "redis://127.0.0.1:1/0"


def producer(*arguments: str, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "producer.cli", *arguments],
        cwd=cwd,
        env=environment(cwd) | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def environment(folder: Path) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": root, "EYAS_STATE_DIR": str(folder / "state")}


def watcher(redis_url: str, folder: Path, output: IO[Any]) -> "subprocess.Popen[bytes]":
    """A running `producer watch` that writes everything into `output`."""
    return subprocess.Popen(
        [sys.executable, "-m", "producer.cli", "watch", "--redis-url", redis_url],
        cwd=folder,
        env=environment(folder),
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def carry(redis_url: str, store: object, **changes: object) -> None:
    with redis.Redis.from_url(redis_url) as client:
        claim(client, store.run, store.path)
        write_board(client, board(store, **changes))


def test_the_table_shows_each_dataset_lane_and_server(tmp_path: Path, redis_url: str) -> None:
    carry(redis_url, small_store(tmp_path / "out"))
    said = producer("status", "--redis-url", redis_url, cwd=tmp_path)
    assert said.returncode == 0
    words = said.stdout.split()
    for expected in ("B1", "away", "short", "connection", "refused", "tiny"):
        assert expected in words
    assert "4 213 of 7 000 samples" in said.stdout
    assert "1.2 M tokens" in said.stdout
    assert "12 min left" in said.stdout
    assert "3.4 K tok/s generated" in said.stdout
    assert "nobody serves short" in said.stdout


def test_what_the_feeder_says_of_a_lane_is_not_said_twice(tmp_path: Path, redis_url: str) -> None:
    note = "no worker serves the lane short: start one with `celery -A workers worker -Q short`"
    carry(redis_url, small_store(tmp_path / "out"), notes=(note,))
    said = producer("status", "--redis-url", redis_url, "--json", cwd=tmp_path)
    assert json.loads(said.stdout)["notes"] == [note]


def test_a_locale_without_our_signs_gets_all_the_rest(tmp_path: Path, redis_url: str) -> None:
    carry(redis_url, small_store(tmp_path / "out"))
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = producer("status", "--redis-url", redis_url, cwd=tmp_path, **ascii_only)
    assert said.returncode == 0, said.stderr
    assert "4 213 of 7 000 samples ? 1.2 M tokens" in said.stdout


def test_in_80_columns_no_word_of_the_status_is_cut(tmp_path: Path, redis_url: str) -> None:
    store = small_store(tmp_path / "out")
    datasets = (
        dataclasses.replace(DATASET, name="B6-nemotron-agentic", closed=True, reading=True),
        dataclasses.replace(DATASET, name="B7", finished=True),
    )
    (server,) = board(store).servers
    servers = (dataclasses.replace(server, url="http://gpu-17.cluster.example:30000"),)
    says = "no room in `/data/eyas`: No space left on device; it goes on when there is some"
    sink = SinkBoard(
        name="sink@gpu-17",
        node="gpu-17",
        state="waiting",
        says=says,
        waiting=12,
        spool_bytes=2_000_000_000,
        spool_max_bytes=64_000_000_000,
    )
    carry(redis_url, store, datasets=datasets, servers=servers, sinks=(sink,))
    said = producer("status", "--redis-url", redis_url, cwd=tmp_path, COLUMNS="80")
    assert said.returncode == 0, said.stderr
    assert max(map(len, said.stdout.splitlines())) <= 80
    assert "…" not in said.stdout
    words = said.stdout.split()
    for expected in (
        "B6-nemotron-agentic",
        "http://gpu-17.cluster.example:30000",
        "away",
        "refused",
        "capped",
    ):
        assert expected in words
    assert says.split() == [word for word in words if word in says.split()][-len(says.split()) :]


CHECKED = Check(server="http://gpu-17:30000", rows=900, worst_error=0.004)
ALARMED = dataclasses.replace(
    CHECKED,
    worst_error=1.4,
    alarms=(Alarm(code="states.row", value=1.4, limit=0.5, message="row 17 of hidden state 5: look at it"),),
)


def test_checks_are_one_line_and_an_alarm_says_what_where_and_at_which_server(
    tmp_path: Path, redis_url: str
) -> None:
    store = small_store(tmp_path / "out")
    carry(redis_url, store, checks=summarize([("ab" * 16, CHECKED)] * 14))
    said = producer("status", "--redis-url", redis_url, cwd=tmp_path)
    assert "checks: 14 samples captured again, worst deviation 0.004; no alarm" in said.stdout
    carry(redis_url, store, checks=summarize([("ab" * 16, CHECKED), ("cd" * 16, ALARMED)]))
    said = producer("status", "--redis-url", redis_url, cwd=tmp_path)
    assert "; 1 with an ALARM" in said.stdout
    assert (
        f"! states.row: 1.4, the limit is 0.5; sample {'cd' * 16}, server http://gpu-17:30000: "
        "row 17 of hidden state 5: look at it" in said.stdout
    )
    report = json.loads(producer("status", "--json", "--redis-url", redis_url, cwd=tmp_path).stdout)
    assert (report["checks"]["samples"], report["checks"]["alarms"][0]["value"]) == (2, 1.4)


def test_alarms_are_red_and_nothing_is_said_of_checks_before_there_was_one(tmp_path: Path) -> None:
    store = small_store(tmp_path / "out")
    shown = draw(board(store, checks=summarize([("cd" * 16, ALARMED)])), ())
    texts = [part for part in shown.renderables if isinstance(part, Text)]
    red = [text.plain for text in texts if text.style == "red"]
    assert [line.split(":")[0] for line in red] == ["checks", "! states.row"]
    plain = [part.plain for part in draw(board(store), ()).renderables if isinstance(part, Text)]
    assert not any("checks" in text for text in plain)


def test_watch_tells_each_alarm_once(tmp_path: Path, redis_url: str) -> None:
    finished = {"finished": True, "checks": summarize([("cd" * 16, ALARMED)])}
    carry(redis_url, small_store(tmp_path / "out"), **finished)
    said = producer("watch", "--redis-url", redis_url, cwd=tmp_path)
    assert [line for line in said.stdout.splitlines() if line.startswith("alarm ")] == [
        line for line in said.stdout.splitlines() if "states.row" in line
    ]
    assert said.stdout.count("states.row") == 1
    assert " checked=1 alarmed=1" in said.stdout


def test_json_holds_the_board_and_whose_figures_they_are(tmp_path: Path, redis_url: str) -> None:
    carry(redis_url, small_store(tmp_path / "out"))
    said = json.loads(producer("status", "--json", "--redis-url", redis_url, cwd=tmp_path).stdout)
    assert (said["source"], said["done"], said["wanted"]) == ("redis", 4213, 7000)
    assert said["datasets"][0]["tokens"] == 1_234_567
    assert said["servers"][0]["state"] == "away"


def test_without_redis_the_store_is_asked_and_status_says_so(tmp_path: Path) -> None:
    small_store(tmp_path / "out")
    said = producer(
        "status", "--json", "--redis-url", NOBODY, "--output-dir", str(tmp_path / "out"), cwd=tmp_path
    )
    report = json.loads(said.stdout)
    assert report["source"] == "store"
    (dataset,) = report["datasets"]
    assert {name: dataset[name] for name in ("wanted", "generated", "stored", "failed", "tokens")} == {
        "wanted": 5,
        "generated": 2,
        "stored": 2,
        "failed": 1,
        "tokens": 2 * 7,
    }
    assert report["finished"] is False
    assert "does not answer" in report["notes"][0]


def test_a_board_nobody_renews_gives_way_to_the_store(tmp_path: Path, redis_url: str) -> None:
    carry(redis_url, small_store(tmp_path / "out"), at=time.time() - 100)
    report = json.loads(producer("status", "--json", "--redis-url", redis_url, cwd=tmp_path).stdout)
    assert report["source"] == "store"
    assert report["wanted"] == 5
    assert any("no sink is up" in note for note in report["notes"])


def test_a_sink_that_lives_but_waits_is_not_said_to_be_missing(tmp_path: Path, redis_url: str) -> None:
    carry(redis_url, small_store(tmp_path / "out"), at=time.time() - 100)
    now = time.time()
    sink = ProcessSnapshot(
        name="sink@n1", lane="sink", node="n1", pid=1, at=now, started=now, state="paused", says="no folder"
    )
    with redis.Redis.from_url(redis_url) as client:
        write_process(client, sink)
    report = json.loads(producer("status", "--json", "--redis-url", redis_url, cwd=tmp_path).stdout)
    (note,) = [note for note in report["notes"] if "nothing was fed" in note]
    assert note.endswith(": sink@n1 is paused: no folder")


def test_with_neither_redis_nor_store_the_error_says_what_to_type(tmp_path: Path) -> None:
    said = producer("status", "--redis-url", NOBODY, cwd=tmp_path)
    assert said.returncode == 3
    assert said.stderr.startswith("error: there is no run in")
    assert "\n\nhint: begin one with `producer enqueue`" in said.stderr


def test_a_folder_without_a_run_is_told_apart_from_a_redis_without_one(
    tmp_path: Path, redis_url: str
) -> None:
    store = small_store(tmp_path / "out")
    command = ("status", "--redis-url", redis_url, "--output-dir", "nothing")
    assert "and Redis carries none" in producer(*command, cwd=tmp_path).stderr
    carry(redis_url, store)
    assert f"and Redis carries that of `{store.path}`" in producer(*command, cwd=tmp_path).stderr
    away = producer("status", "--redis-url", NOBODY, cwd=tmp_path)
    assert f"and no Redis answers at `{NOBODY}`" in away.stderr


def test_another_run_in_redis_is_not_taken_for_this_one(tmp_path: Path, redis_url: str) -> None:
    carry(redis_url, small_store(tmp_path / "theirs"))
    small_store(tmp_path / "ours", responses=1, failures=0)
    arguments = ("status", "--json", "--redis-url", redis_url, "--output-dir", str(tmp_path / "ours"))
    report = json.loads(producer(*arguments, cwd=tmp_path).stdout)
    assert report["datasets"][0]["stored"] == 1
    assert str(tmp_path / "theirs") in report["notes"][0]


def test_watch_of_a_finished_run_ends_at_once_with_0(tmp_path: Path) -> None:
    small_store(tmp_path / "out", responses=5, failures=0)
    said = producer("watch", "--redis-url", NOBODY, "--output-dir", str(tmp_path / "out"), cwd=tmp_path)
    assert said.returncode == 0
    assert "watch state=finished done=5 wanted=5 generated=5 stored=5 failed=0 tokens=35" in said.stdout


def test_watch_of_a_run_with_dead_letters_ends_with_1(tmp_path: Path) -> None:
    small_store(tmp_path / "out", responses=4, failures=1)
    said = producer("watch", "--redis-url", NOBODY, "--output-dir", str(tmp_path / "out"), cwd=tmp_path)
    assert said.returncode == 1


def test_watch_follows_the_run_to_its_end_line_by_line(tmp_path: Path, redis_url: str) -> None:
    store = small_store(tmp_path / "out", responses=5, failures=0)
    carry(redis_url, store)
    log = tmp_path / "log"
    with log.open("w") as output:
        watching = watcher(redis_url, tmp_path, output)
    try:
        until(lambda: "state=running done=4213 wanted=7000" in log.read_text())
        assert "short_in_flight=3" in log.read_text()
        done = dataclasses.replace(DATASET, stored=7000, failed=0, finished=True)
        carry(redis_url, store, datasets=(done,), finished=True)
        assert watching.wait(timeout=30) == 0
        assert "state=finished done=7000" in log.read_text()
    finally:
        watching.kill()
        watching.wait()


def test_ctrl_c_ends_the_watching_with_130(tmp_path: Path, redis_url: str) -> None:
    carry(redis_url, small_store(tmp_path / "out"))
    watching = subprocess.Popen(
        [sys.executable, "-m", "producer.cli", "watch", "--redis-url", redis_url],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith("run id=")
    watching.send_signal(signal.SIGINT)
    assert watching.wait(timeout=30) == 130
    watching.stdout.close()


def test_in_40_columns_every_dataset_has_its_whole_name_and_its_figures(
    tmp_path: Path, redis_url: str
) -> None:
    datasets = (
        dataclasses.replace(DATASET, name="B6-nemotron-agentic-of-2026", failed=3),
        dataclasses.replace(DATASET, name="B7", finished=True),
    )
    carry(redis_url, small_store(tmp_path / "out"), datasets=datasets)
    said = producer("status", "--redis-url", redis_url, cwd=tmp_path, COLUMNS="40")
    assert said.returncode == 0, said.stderr
    text = " ".join(said.stdout.split())
    assert "B6-nemotron-agentic-of-2026: 4 210 of 7 000 stored, 3 failed, 60 %" in text
    assert "B7: 4 210 of 7 000 stored, 3 failed, done" in text
    assert max(map(len, said.stdout.splitlines())) <= 40


def test_what_was_wasted_and_what_has_failed_is_said(tmp_path: Path, redis_url: str) -> None:
    carry(redis_url, small_store(tmp_path / "out"), wasted=12, wasted_tokens=14_210)
    said = producer("status", "--redis-url", redis_url, cwd=tmp_path)
    assert "wasted: 12 calls, 14.2 K tokens" in said.stdout
    assert "3 failed: `producer status --failed` lists them" in said.stdout
    content = json.loads(producer("status", "--json", "--redis-url", redis_url, cwd=tmp_path).stdout)
    assert (content["wasted"], content["wasted_tokens"]) == (12, 14_210)


def test_a_servers_reason_is_said_once_and_since_when_and_who_waits_beside_it(
    tmp_path: Path, redis_url: str
) -> None:
    note = "long: server http://127.0.0.1:1 away for 12 min, 431 wait: connection refused"
    carry(redis_url, small_store(tmp_path / "out"), notes=(note,))
    said = producer("status", "--redis-url", redis_url, cwd=tmp_path)
    assert "! long: server http://127.0.0.1:1 away for 12 min, 431 wait\n" in said.stdout
    assert said.stdout.count("connection refused") == 1
    content = json.loads(producer("status", "--json", "--redis-url", redis_url, cwd=tmp_path).stdout)
    assert content["notes"][0] == note


def test_watch_says_again_only_what_is_new_and_not_that_it_lasts(tmp_path: Path, redis_url: str) -> None:
    store = small_store(tmp_path / "out")
    say = "long: server http://127.0.0.1:1 away for {}, {} wait: connection refused"
    carry(redis_url, store, notes=(say.format("12 s", 31),))
    log = tmp_path / "watch.log"
    with log.open("wb") as output:
        process = watcher(redis_url, tmp_path, output)
    try:
        until(lambda: "31 wait" in log.read_text())
        carry(redis_url, store, notes=(say.format("2 min", 1431), "another note"))
        until(lambda: "another note" in log.read_text())
        assert "1431 wait" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def test_watch_stays_with_its_run_when_redis_forgets_it(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry(redis_url, small_store(tmp_path / "out"))
    small_store(tmp_path / "eyas-data")
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def twice(again: Callable[[], Report]) -> Report:
        seen.append(again().board.run_id)
        with redis.Redis.from_url(redis_url) as client:
            client.flushdb()
        report = again()
        seen.append(report.board.run_id)
        return report

    monkeypatch.setattr(watch, "_lines", twice)
    monkeypatch.setattr(watch, "is_terminal", lambda stream: False)
    watch.follow(redis_url, None)
    run = Store.open(tmp_path / "out").run.id
    assert seen == [run, run]
