"""`producer enqueue` against a real Redis and the embedded engine: what it does, and what it refuses."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from transformers import AutoTokenizer

from producer.machine.redis_server import free_port
from storage.run import read_run
from storage.settings import read_settings
from storage.store import Store
from tests.producer.small import Cli, Ended, write_lines, write_model

Enqueue = Callable[..., Ended]


@pytest.fixture
def enqueue(cli: Cli, redis_url: str, server: str) -> Enqueue:
    """`producer enqueue` with Redis, server and folder given."""

    def run(*arguments: str | Path) -> Ended:
        where = ("--redis-url", redis_url, "--server-url", server, "--output-dir", "out")
        return cli("enqueue", *where, *arguments)

    return run


def rows(count: int) -> list[object]:
    return [{"prompt": f"What is {n} and {n}?"} for n in range(count)]


def refused(ended: Ended, status: int, said: str, hint: str) -> None:
    """As every error is said: `error: …`, a blank line, `hint: …`."""
    assert ended.status == status, ended.err
    message, _, rest = ended.err.partition("error: ")[2].partition("\n\nhint: ")
    assert said in message
    assert hint in rest
    assert "Traceback" not in ended.err


def manifest(*tables: str) -> Path:
    path = Path("sets.toml")
    path.write_text("".join(f"[[dataset]]\n{table}\n" for table in tables))
    return path


# What it does


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


def test_the_first_words_come_within_a_second_into_a_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "producer.cli", "enqueue", "--redis-url", "redis://10.255.255.1:1/0"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=output,
            stderr=output,
        )
        began = time.monotonic()
        try:
            while not log.stat().st_size:
                assert time.monotonic() - began < 10
                time.sleep(0.01)
            took = time.monotonic() - began
        finally:
            process.kill()
            process.wait()
    assert took < 1.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert log.read_text().startswith("eyas ")


# What it refuses


def test_a_missing_file(enqueue: Enqueue) -> None:
    ended = enqueue("--manifest", manifest('name = "B1"\nsource = "file:gone.jsonl"'))
    refused(ended, 2, "gone.jsonl` is not there", "relative to the manifest")


def test_an_empty_file(enqueue: Enqueue) -> None:
    Path("b1.jsonl").touch()
    refused(enqueue("--manifest", "b1.jsonl"), 2, "b1.jsonl` is empty", "fill the file")


def test_rows_without_a_known_column(enqueue: Enqueue) -> None:
    source = write_lines(Path("b1.jsonl"), [{"body": "hi", "n": 1}])
    refused(enqueue("--manifest", source), 2, "which has: `body`, `n`", "column =")
    assert not Path("out").exists()


def test_one_row_without_the_column_is_dropped_and_the_rest_goes_on(enqueue: Enqueue) -> None:
    source = write_lines(Path("b1.jsonl"), [*rows(2), {"body": "hi"}, *rows(1)])
    ended = enqueue("--manifest", source)
    assert ended.status == 0, ended.err
    assert "b1: skipped b1.jsonl line 3: row.no_column (prompt)" in ended.err
    assert "3 new prompts" in ended.err


def test_a_dataset_without_a_single_prompt(enqueue: Enqueue) -> None:
    source = write_lines(Path("b1.jsonl"), [{"prompt": "  "}] * 3)
    refused(enqueue("--manifest", source), 2, "no prompt could be made of b1", "producer plan")


def test_an_unknown_partition(enqueue: Enqueue) -> None:
    write_lines(Path("b1.jsonl"), rows(1))
    sets = manifest('name = "chat"\nsource = "file:b1.jsonl"')
    refused(
        enqueue("--manifest", sets, "--partition", "chatt"), 2, "no dataset `chatt`", "did you mean `chat`?"
    )


def test_no_server_at_the_first_enqueue(cli: Cli, redis_url: str) -> None:
    source = write_lines(Path("b1.jsonl"), rows(1))
    away = f"127.0.0.1:{free_port()}"
    ended = cli("enqueue", "--manifest", source, "--redis-url", redis_url, "--server-url", away)
    refused(ended, 3, "no server answers", "--server-url")
    assert not Path("eyas-data").exists()


def test_a_server_with_another_model_than_the_one_named(enqueue: Enqueue, model: Path) -> None:
    source = write_lines(Path("b1.jsonl"), rows(1))
    refused(enqueue("--manifest", source, "--model", model), 3, "the run is for", "--model")


def test_a_server_with_a_smaller_vocabulary_than_the_tokenizer(
    enqueue: Enqueue, cli: Cli, tmp_path: Path
) -> None:
    source = write_lines(Path("b1.jsonl"), rows(1))
    assert enqueue("--manifest", source).status == 0
    run = read_run(Path("out"))
    assert run is not None
    folder = tmp_path / "other" / Path(run.spec.model).name
    write_model(folder, vocab_size=320, more_tokens=2000, model_vocab_size=4000)
    ended = enqueue("--manifest", source, "--model", folder, "--output-dir", "out2")
    refused(ended, 3, "knows `2000` token ids, the tokenizer makes `2320`", "--model")


def test_a_tokenizer_that_makes_more_ids_than_its_own_model_knows(enqueue: Enqueue, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "odd", vocab_size=320, model_vocab_size=300)
    source = write_lines(Path("b1.jsonl"), rows(1))
    refused(
        enqueue("--manifest", source, "--model", folder),
        3,
        "makes `320` ids, its model knows `300`",
        "--model",
    )


def test_a_server_without_hidden_states(cli: Cli, redis_url: str, server_without_states: str) -> None:
    source = write_lines(Path("b1.jsonl"), rows(1))
    where = ("--redis-url", redis_url, "--server-url", server_without_states, "--manifest", source)
    refused(cli("enqueue", *where), 3, "gives no hidden states", "--enable-return-hidden-states")
    assert not Path("eyas-data").exists()
    assert cli("enqueue", *where, "--states", "off").status == 0


def test_a_tokenizer_without_a_chat_template(cli: Cli, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base", vocab_size=320, template=None)
    source = write_lines(Path("b1.jsonl"), rows(1))
    refused(
        cli("plan", "--manifest", source, "--model", folder), 3, "has no chat template", "chat_template.jinja"
    )


def test_no_redis(cli: Cli, server: str) -> None:
    source = write_lines(Path("b1.jsonl"), rows(1))
    away = f"redis://127.0.0.1:{free_port()}/0"
    ended = cli("enqueue", "--manifest", source, "--server-url", server, "--redis-url", away)
    refused(ended, 3, f"no Redis answers at `{away}`", "producer up")
    assert not Path("eyas-data").exists()


def test_a_redis_that_carries_another_unfinished_run(enqueue: Enqueue) -> None:
    source = write_lines(Path("b1.jsonl"), rows(3))
    assert enqueue("--manifest", source).status == 0
    refused(enqueue("--manifest", source, "--output-dir", "other"), 3, "carries the run of", "EYAS_REDIS_URL")
    assert not Path("other").exists()  # or its flags of now would be another run's later


def test_a_redis_that_carries_a_run_whose_folder_was_deleted(enqueue: Enqueue) -> None:
    source = write_lines(Path("b1.jsonl"), rows(3))
    assert enqueue("--manifest", source).status == 0
    shutil.rmtree("out")
    refused(enqueue("--manifest", source), 3, "not in its folder", "put that folder back")
    assert not Path("out").exists()


def test_a_redis_without_memory_is_named_and_the_same_command_goes_on_later(
    enqueue: Enqueue, redis_url: str
) -> None:
    source = write_lines(Path("b1.jsonl"), rows(3))
    with redis.Redis.from_url(redis_url) as client:
        before = client.config_get("maxmemory")["maxmemory"]
        client.config_set("maxmemory", "1")
        try:
            refused(enqueue("--manifest", source), 3, "refuses what Eyas writes", "memory left")
        finally:
            client.config_set("maxmemory", before)
        assert enqueue("--manifest", source).status == 0
        assert client.hlen("eyas:window") == 3


def test_a_folder_that_cannot_be_written(enqueue: Enqueue) -> None:
    source = write_lines(Path("b1.jsonl"), rows(1))
    Path("closed").mkdir(mode=0o500)
    folder = "/proc/eyas" if os.geteuid() == 0 else "closed/out"
    ended = enqueue("--manifest", source, "--output-dir", folder)
    assert ended.status == 3, ended.err
    assert folder in ended.err
    assert "hint: " in ended.err


def test_a_folder_whose_name_is_too_long(enqueue: Enqueue) -> None:
    ended = enqueue("--max-samples", "1", "--output-dir", "x" * 300)
    refused(ended, 3, "File name too long", "run the same command again")


def test_the_folder_of_another_run(enqueue: Enqueue) -> None:
    source = write_lines(Path("b1.jsonl"), rows(1))
    assert enqueue("--manifest", source).status == 0
    ended = enqueue("--manifest", source, "--temperature", "0.2", "--short-max-tokens", "99")
    refused(ended, 3, "sampling.temperature: `1.0` → `0.2`", "--output-dir")
    assert "short_max_tokens: `10240` → `99`" in ended.err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-samples", "0"),
        ("--max-samples", "-5"),
        ("--max-samples", "many"),
        ("--max-tokens", "0"),
        ("--short-concurrency", "0"),
        ("--long-concurrency", "-1"),
        ("--capture-concurrency", "0"),
        ("--short-max-tokens", "0"),
        ("--long-max-tokens", "-1"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", "0"),
        ("--top-p", "nan"),
        ("--top-k", "0"),
        ("--capture", "eagle4"),
    ],
)
def test_a_limit_that_cannot_be_meant(enqueue: Enqueue, flag: str, value: str) -> None:
    source = write_lines(Path("b1.jsonl"), rows(1))
    ended = enqueue("--manifest", source, flag, value)
    assert ended.status == 2
    assert flag in ended.err
    assert "\n\nhint: " in ended.err
    assert not Path("out").exists()


def test_max_samples_0_says_what_to_do_instead(enqueue: Enqueue) -> None:
    refused(enqueue("--max-samples", "0"), 2, "leave it out for no cap", "producer enqueue --help")


def test_an_unknown_key_in_the_settings_file(cli: Cli) -> None:
    Path("eyas.toml").write_text("max_sample = 5\n")
    refused(cli("enqueue"), 2, "unknown key `max_sample` in `eyas.toml`", "did you mean `max_samples`?")


@pytest.mark.parametrize("line", ['output_dir = ["a"]', "[max_samples]", "model = 2026-01-01", "seed = [1]"])
def test_a_settings_value_of_another_kind_is_named(cli: Cli, line: str) -> None:
    Path("eyas.toml").write_text(f"{line}\n")
    key = line.strip("[]").partition(" ")[0]
    refused(cli("enqueue"), 2, f"`{key}` in `eyas.toml` is", "a text or a number")


def test_an_unknown_key_in_the_manifest(enqueue: Enqueue) -> None:
    sets = manifest('name = "B1"\nsource = "file:b1.jsonl"\nlanes = "short"')
    refused(enqueue("--manifest", sets), 2, "unknown key `lanes`", "did you mean `lane`?")


def test_a_source_that_changed_under_a_run(enqueue: Enqueue) -> None:
    source = write_lines(Path("b1.jsonl"), rows(5))
    assert enqueue("--manifest", source).status == 0
    write_lines(source, rows(6))
    refused(enqueue("--manifest", source), 3, "source_digest", "another `name`")


def test_what_is_stored_is_json_that_anybody_reads(enqueue: Enqueue) -> None:
    assert enqueue("--max-samples", "2").status == 0
    facts = [json.loads(path.read_text()) for path in Path("out/facts").iterdir()]
    assert [fact["states"] for fact in facts] == ["plugin"]
