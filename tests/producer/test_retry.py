"""`status --failed` and `retry`: what has failed, tried once more, and dead again when it fails again."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from storage.index import Index, Outcome
from storage.sample import Failure, Stage
from storage.settings import read_settings, write_settings
from storage.store import Store
from tests.producer.stored import make_response, small_store
from tests.producer.test_status import NOBODY, environment, producer
from workers.runs import claim, finish, read_carried


def fail(store: Store, at: int, code: str, **fields: object) -> Failure:
    prompt = store.prompt("B1", at)
    failure = Failure(
        id=prompt.id,
        digest=None,
        capture=None,
        dataset="B1",
        stage=Stage.GENERATE,
        attempts=3,
        code=code,
        message="it said:\n\tno",
    )
    failure = replace(failure, **fields)
    store.commit_failures([failure])
    return failure


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Ten prompts: two answered, two of them refused, one that kills its server."""
    store = small_store(tmp_path / "out", prompts=10, failures=0)
    fail(store, 4, "server.refused")
    fail(store, 7, "prompt.kills_server", attempts=6)
    fail(store, 2, "server.refused")
    return store


def dead(store: Store) -> list[int]:
    """Positions of the prompts that are dead letters now."""
    index = Index(store, None, read_settings(store.path).retries)
    index.refresh()
    return (index.dataset("B1").outcome == Outcome.DEAD).nonzero()[0].tolist()


def retry(store: Store, *arguments: str, url: str = NOBODY) -> "subprocess.CompletedProcess[str]":
    return producer(
        "retry", *arguments, "--output-dir", str(store.path), "--redis-url", url, cwd=store.path.parent
    )


def failed(store: Store, *arguments: str) -> "subprocess.CompletedProcess[str]":
    where = ("--output-dir", str(store.path), "--redis-url", NOBODY)
    return producer("status", "--failed", *arguments, *where, cwd=store.path.parent)


def test_failed_lists_each_dead_letter_with_its_source_after_the_counts(store: Store) -> None:
    said = failed(store)
    assert said.returncode == 0, said.stderr
    ids = [store.prompt("B1", at).id.hex() for at in (2, 4, 7)]
    rows = [store.prompt("B1", at).source_row for at in (2, 4, 7)]
    assert said.stdout.splitlines() == [
        "# 2 server.refused",
        "# 1 prompt.kills_server",
        "id\tdataset\trow\tstage\tcode\tattempts\tmessage",
        f"{ids[0]}\tB1\t{rows[0]}\tgenerate\tserver.refused\t3\tit said: no",
        f"{ids[1]}\tB1\t{rows[1]}\tgenerate\tserver.refused\t3\tit said: no",
        f"{ids[2]}\tB1\t{rows[2]}\tgenerate\tprompt.kills_server\t6\tit said: no",
    ]
    content = json.loads(failed(store, "--json").stdout)
    assert content["codes"] == {"server.refused": 2, "prompt.kills_server": 1}
    assert [one["id"] for one in content["dead_letters"]] == ids


def test_a_response_or_a_lower_cap_takes_a_dead_letter_off_the_list(store: Store) -> None:
    store.commit_responses([make_response(store.prompt("B1", 4))])
    settings = read_settings(store.path)
    caps = replace(settings.datasets["B1"], max_samples=7)
    write_settings(store.path, replace(settings, datasets={"B1": caps}))
    content = json.loads(failed(store, "--json").stdout)
    assert [one["row"] for one in content["dead_letters"]] == [2]


def test_failed_without_a_failure_says_so(tmp_path: Path) -> None:
    said = failed(small_store(tmp_path / "out", failures=0))
    assert (said.returncode, said.stdout) == (0, "# nothing has failed\n")


def test_a_terminal_gets_a_table_with_whole_codes(store: Store, tmp_path: Path) -> None:
    def on_a_terminal(folder: Path) -> str:
        command = [sys.executable, "-m", "producer.cli", "status", "--failed", "--redis-url", NOBODY]
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*command, "--output-dir", str(folder)],
            cwd=tmp_path,
            env=environment(tmp_path) | {"COLUMNS": "100", "TERM": "dumb"},
            stdout=theirs,
        )
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # what Linux says when the other end is closed
            while part := os.read(ours, 4096):
                said += part
        os.close(ours)
        assert process.wait(timeout=60) == 0
        return said.decode()

    fail(store, 8, "server.refused", message="no [/bold] markup [red]")
    text = on_a_terminal(store.path)
    assert "[/bold]" in text
    assert [line.split() for line in text.splitlines()[:2]] == [
        ["3", "server.refused"],
        ["1", "prompt.kills_server"],
    ]
    assert text.count("prompt.kills_server") == 2
    assert max(map(len, text.splitlines())) <= 100
    empty = small_store(tmp_path / "empty", failures=0)
    assert on_a_terminal(empty.path).strip() == "nothing has failed"


def test_a_retry_opens_what_fits_it_and_asked_twice_is_one(store: Store) -> None:
    assert dead(store) == [2, 4, 7]
    first = retry(store, "--code", "server.refused")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "2 will be tried again (server.refused 2)\n"
    assert dead(store) == [7]
    again = retry(store, "--code", "server.refused")
    assert again.stdout == "2 asked for already\n"
    assert len(read_settings(store.path).retries) == 1
    rest = retry(store)
    assert rest.stdout == "1 will be tried again (prompt.kills_server 1); 2 asked for already\n"
    assert dead(store) == []
    assert "(asked again)" in failed(store).stdout


def test_what_fails_again_is_dead_again_until_it_is_asked_for_once_more(store: Store) -> None:
    retry(store)
    number = read_settings(store.path).retries[-1].number
    # A result of before the retry that comes late is no outcome of it.
    fail(store, 4, "server.refused")
    assert 4 not in dead(store)
    fail(store, 4, "server.slow", retry=number)
    assert dead(store) == [4]
    fail(store, 4, "server.slow", retry=number)
    assert [f.code for f in store.failures() if f.id == store.prompt("B1", 4).id] == [
        "server.refused",
        "server.slow",
    ]
    content = json.loads(failed(store, "--json").stdout)
    assert (content["failed"], content["again"]) == (1, 2)
    assert retry(store, "--code", "server.slow").stdout == "1 will be tried again (server.slow 1)\n"
    assert dead(store) == []
    assert Store.open(store.path).commit_responses([make_response(store.prompt("B1", 4))]) == 1
    content = json.loads(failed(store, "--json").stdout)
    assert [one["row"] for one in content["dead_letters"]] == [2, 7]


def test_a_retry_by_id_takes_the_beginning_of_one(store: Store) -> None:
    name = store.prompt("B1", 7).id.hex()
    assert retry(store, "--id", name[:8]).stdout == "1 will be tried again (prompt.kills_server 1)\n"
    assert dead(store) == [2, 4]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--code", "server.refusd"), "did you mean `server.refused`?"),
        (("--dataset", "other"), "there are: B1"),
        (("--id", "ffffffff"), "`producer status --failed` lists them"),
        (("--id", "0"), "give at least 6 digits"),
    ],
)
def test_what_no_dead_letter_has_is_answered_with_what_there_is(
    store: Store, flags: tuple[str, ...], says: str
) -> None:
    said = retry(store, *flags)
    assert said.returncode == 2
    assert says in said.stderr
    assert dead(store) == [2, 4, 7]


def test_where_no_run_is_a_retry_says_so(tmp_path: Path) -> None:
    where = ("--output-dir", str(tmp_path / "out"), "--redis-url", NOBODY)
    said = producer("retry", *where, cwd=tmp_path)
    assert said.returncode == 3
    assert f"there is no run in `{tmp_path / 'out'}`" in said.stderr
    assert "\nhint: " in said.stderr


def test_a_retry_wakes_the_feeder(store: Store, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        claim(client, store.run, store.path)
        finish(client, store.run.id)
        said = retry(store, "--json", url=redis_url)
        assert json.loads(said.stdout) == {
            "again": 3,
            "codes": {"server.refused": 2, "prompt.kills_server": 1},
            "asked_already": 0,
            "capped": 0,
        }
        assert client.llen("eyas:wake") == 1
        carried = read_carried(client)
        assert carried is not None
        assert carried.finished, "only the feeder says otherwise"


def test_what_a_full_dataset_does_not_want_is_said_and_not_asked_for(store: Store) -> None:
    settings = read_settings(store.path)
    caps = replace(settings.datasets["B1"], max_tokens=14)
    write_settings(store.path, replace(settings, datasets={"B1": caps}))
    assert retry(store).stdout == "3 not wanted: their dataset has reached its `max_tokens`\n"
    assert read_settings(store.path).retries == ()


def test_two_retries_at_once_are_both_written_down(store: Store) -> None:
    command = [sys.executable, "-m", "producer.cli", "retry", "--redis-url", NOBODY]
    command += ["--output-dir", str(store.path)]
    both = [
        subprocess.Popen(
            [*command, "--code", code],
            cwd=store.path.parent,
            env=environment(store.path.parent),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for code in ("server.refused", "prompt.kills_server")
    ]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert dead(store) == []
    assert [each.number for each in read_settings(store.path).retries] == [1, 2]
