"""What `producer enqueue` refuses: each error names the thing, the value and what to type."""

import json
import os
import shutil
from pathlib import Path

import pytest
import redis

from producer.machine.redis_server import free_port
from storage.run import read_run
from tests.producer.enqueuing import Enqueue, manifest, refused, rows
from tests.producer.small import Cli, write_lines, write_model


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
