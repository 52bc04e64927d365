"""`producer enqueue` against a real Redis and the embedded engine: what it does."""

import os
import subprocess
import sys
from pathlib import Path

import redis
from transformers import AutoTokenizer

from producer.machine.redis_server import free_port
from storage.run import read_run
from storage.settings import read_settings
from storage.store import Store
from tests.producer.enqueuing import Enqueue, manifest, rows
from tests.producer.machine.supervised import until
from tests.producer.small import Cli, write_lines


def test_a_first_enqueue_stores_prompts_and_queues_them(
    enqueue: Enqueue, redis_url: str, server: str
) -> None:
    write_lines(Path("b1.jsonl"), [*rows(30), "{broken", *rows(3)])
    write_lines(Path("b2.jsonl"), [{"turns": ["long one"]}] * 2)
    sets = manifest(
        'name = "B1"\nsource = "file:b1.jsonl"', 'name = "B2"\nsource = "file:b2.jsonl"\nlane = "long"'
    )
    ended = enqueue("--manifest", sets)
    assert ended.status == 0, ended.err
    assert "B1: skipped b1.jsonl line 31: json.broken" in ended.err
    assert "33 new prompts" in ended.err
    assert "0 of 35 samples are in the store, 35 to go; 35 calls are out" in ended.err
    assert "nobody listens on capture, long, short" in ended.err
    with redis.Redis.from_url(redis_url) as client:
        assert (client.llen("short"), client.llen("long")) == (33, 2)
        assert client.hlen("eyas:window") == 35
    store = Store.open(Path("out"))
    model = store.run.spec.model
    tokenizer = AutoTokenizer.from_pretrained(model)
    for prompt, row in zip(store.prompts("B1"), [*rows(30), *rows(3)], strict=True):
        expected = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        assert prompt.tokens.tolist() == expected
    settings = read_settings(Path("out"))
    assert settings.server_urls == settings.capture_urls == (server,)
    assert settings.concurrency == {"short": 150, "long": 32, "capture": 64}
    assert store.run.spec.capture is not None
    assert store.run.spec.capture.hs_indices == (2, 4, 5, 8)


def test_again_everything_is_skipped_and_a_raised_cap_adds_the_more(
    enqueue: Enqueue, cli: Cli, redis_url: str
) -> None:
    source = write_lines(Path("b1.jsonl"), rows(100))
    assert "70 new prompts" in enqueue("--manifest", source, "--max-samples", "70").err
    again = cli(
        "enqueue",
        "--manifest",
        source,
        "--max-samples",
        "70",
        "--redis-url",
        redis_url,
        "--output-dir",
        "out",
    )
    assert again.status == 0, again.err
    assert "b1: 70 tokenized, skipped" in again.err
    assert "4 new prompts, 74 in all" in enqueue("--manifest", source, "--max-samples", "74").err
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("short") == client.hlen("eyas:window") == 74


def test_how_often_samples_are_checked_may_change_and_stays_when_nothing_is_said(enqueue: Enqueue) -> None:
    write_lines(Path("b1.jsonl"), rows(5))
    job = ("--manifest", manifest('name = "B1"\nsource = "file:b1.jsonl"'))

    def every(*flags: str) -> int:
        done = enqueue(*job, *flags)
        assert done.status == 0, done.err
        return read_settings(Path("out")).check_every

    assert every() == 500
    assert every("--check-every", "3") == 3
    assert every("--max-samples", "4") == 3
    assert every("--check-every", "0") == 0
    assert every() == 0
    assert enqueue(*job, "--check-every", "-1").status == 2


def test_a_later_enqueue_needs_no_server_and_keeps_what_the_run_was_begun_with(
    enqueue: Enqueue, cli: Cli, redis_url: str, server: str
) -> None:
    write_lines(Path("b1.jsonl"), rows(5))
    write_lines(Path("b2.jsonl"), rows(6))
    sets = manifest('name = "B1"\nsource = "file:b1.jsonl"', 'name = "B2"\nsource = "file:b2.jsonl"')
    first = enqueue(
        "--manifest", sets, "--partition", "B1", "--temperature", "0.5", "--short-concurrency", "9"
    )
    assert first.status == 0, first.err
    away = f"http://127.0.0.1:{free_port()}"
    where = ("--redis-url", redis_url, "--output-dir", "out", "--server-url", away)
    later = cli("enqueue", *where, "--manifest", sets, "--partition", "B2", "--long-concurrency", "3")
    assert later.status == 0, later.err
    assert "warning:" in later.err
    assert "B2: 6 new prompts" in later.err
    settings = read_settings(Path("out"))
    assert settings.server_urls == (away,)
    assert settings.concurrency == {"short": 9, "long": 3, "capture": 64}
    assert set(settings.datasets) == {"B1", "B2"}
    run = read_run(Path("out"))
    assert run is not None
    assert run.spec.sampling.temperature == 0.5


def test_two_that_enqueue_other_datasets_at_once_are_both_wanted(
    enqueue: Enqueue, redis_url: str, server: str
) -> None:
    write_lines(Path("b1.jsonl"), rows(5))
    names = ("B1", "B2", "B3")
    sets = manifest(*(f'name = "{name}"\nsource = "file:b1.jsonl"' for name in names))
    command = [sys.executable, "-m", "producer.cli", "enqueue", "--manifest", sets, "--output-dir", "out"]
    command += ["--redis-url", redis_url, "--server-url", server]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    started = [
        subprocess.Popen([*command, "--partition", name], env=environ, stdin=subprocess.DEVNULL)
        for name in names
    ]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert set(read_settings(Path("out")).datasets) == set(names)


def test_a_server_named_twice_is_one_server(enqueue: Enqueue, server: str) -> None:
    source = write_lines(Path("b1.jsonl"), rows(1))
    assert enqueue("--manifest", source, "--server-url", f"{server}/").status == 0
    settings = read_settings(Path("out"))
    assert settings.server_urls == settings.capture_urls == (server,)


def test_tokenized_rows_go_to_capture(enqueue: Enqueue, redis_url: str) -> None:
    source = write_lines(
        Path("a1.jsonl"), [{"input_ids": [5, 6, 7, n], "loss_mask": [0, 0, 1, 1]} for n in range(9)]
    )
    assert enqueue("--manifest", source).status == 0
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("capture") == 9


def test_with_nothing_left_to_do_it_says_so_and_asks_for_no_workers(enqueue: Enqueue) -> None:
    source = write_lines(Path("a1.jsonl"), [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    for said in ("2 new prompts", "2 tokenized, skipped"):
        ended = enqueue("--manifest", source, "--states", "off")
        assert ended.status == 0, ended.err
        assert said in ended.err
        assert ended.err.endswith("nothing is left to do: 2 of 2 samples are in the store\n")


def test_without_a_manifest_the_bundled_prompts_are_taken_and_it_says_so(enqueue: Enqueue) -> None:
    ended = enqueue("--max-samples", "3")
    assert ended.status == 0, ended.err
    assert "bundled prompts (chat, code, math, talks)" in ended.err


def test_the_settings_file_stands_under_the_flags(cli: Cli, redis_url: str, server: str) -> None:
    write_lines(Path("b1.jsonl"), rows(20))
    Path("eyas.toml").write_text(
        f'manifest = "b1.jsonl"\nserver_url = "{server}"\nredis_url = "{redis_url}"\n'
        'output_dir = "out"\nmax_samples = 9\nlong_concurrency = 5\n'
    )
    os.environ.pop("EYAS_REDIS_URL")
    ended = cli("enqueue", "--max-samples", "7")
    assert ended.status == 0, ended.err
    assert "7 new prompts" in ended.err
    assert read_settings(Path("out")).concurrency["long"] == 5


def test_the_first_words_are_in_the_file_while_redis_has_not_answered(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            # an address that nothing answers from, not even with a refusal
            [sys.executable, "-m", "producer.cli", "enqueue", "--redis-url", "redis://10.255.255.1:1/0"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=output,
            stderr=output,
        )
        try:
            until(lambda: log.stat().st_size)
            assert log.read_text().startswith("eyas ")
        finally:
            process.kill()
            process.wait()
