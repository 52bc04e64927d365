"""`producer plan`: counts against what transformers gives, bytes against L · H · 2."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.producer.small import Cli, write_lines, write_model


def test_counts_are_those_of_the_rows_and_bytes_follow_the_capture(
    cli: Cli, model: Path, encode: Callable[..., list[int]]
) -> None:
    texts = [f"What is {n}?" * (n + 1) for n in range(40)]
    write_lines(Path("b1.jsonl"), [*({"prompt": text} for text in texts), "{broken", {"prompt": ""}])
    write_lines(Path("a1.jsonl"), [{"input_ids": [9] * 20}, {"input_ids": [999]}])
    Path("sets.toml").write_text(
        '[[dataset]]\nname = "B1"\nsource = "file:b1.jsonl"\n'
        '[[dataset]]\nname = "A1"\nsource = "file:a1.jsonl"\n'
    )
    ended = cli("plan", "--manifest", "sets.toml", "--model", model, "--json", "--response-tokens", "100")
    assert ended.status == 0, ended.err
    plan = json.loads(ended.out)
    first, second = plan["datasets"]
    lengths = sorted(len(encode({"role": "user", "content": text})) for text in texts)
    assert first["prompts"] == 40
    assert first["prompt_tokens"] == {
        "total": sum(lengths),
        "mean": round(sum(lengths) / 40),
        "p95": lengths[38],
        "max": lengths[-1],
    }
    assert first["lanes"] == {"short": 40}
    assert first["dropped"] == {"json.broken": 1, "content.empty": 1}
    assert second["lanes"] == {"capture": 1}
    assert second["dropped"] == {"tokens.vocabulary": 1}
    tokens = sum(lengths) + 20 + 40 * 100
    assert [(s["capture"], s["bytes_per_token"], s["bytes"]) for s in plan["states"]] == [
        ("eagle3", 4 * 64 * 2, 4 * 64 * 2 * tokens),
        ("aux", 3 * 64 * 2, 3 * 64 * 2 * tokens),
        ("final", 64 * 2, 64 * 2 * tokens),
    ]


def test_long_prompts_of_an_auto_dataset_go_to_the_long_lane(cli: Cli, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "wide", vocab_size=320, context=100_000)
    write_lines(Path("b1.jsonl"), [{"prompt": "7 " * count} for count in (10, 1000, 3000)])
    plan = json.loads(cli("plan", "--manifest", "b1.jsonl", "--model", folder, "--json").out)
    lanes = plan["datasets"][0]["lanes"]
    assert lanes == {"short": 2, "long": 1}


def test_the_text_names_datasets_reasons_and_bytes(cli: Cli, model: Path) -> None:
    write_lines(Path("b1.jsonl"), [{"prompt": "hi"}] * 1200 + ["{"])
    ended = cli("plan", "--manifest", "b1.jsonl", "--model", model)
    assert ended.status == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0].split() == [
        *("dataset", "form", "lanes", "prompts", "tokens", "mean", "p95", "max", "dropped"),
    ]
    assert "1 200" in lines[1]
    assert "b1 drops json.broken 1" in ended.out
    assert "eagle3" in ended.out


def test_a_plan_writes_nothing_and_asks_no_redis(cli: Cli, model: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cli("plan", "--model", model, "--max-samples", "5").status == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_model_a_server_is_asked_and_without_one_it_says_so(cli: Cli, server: str) -> None:
    ended = cli("plan", "--server-url", server, "--json", "--max-samples", "2")
    assert ended.status == 0, ended.err
    assert "tiny" in json.loads(ended.out)["model"]
    away = cli("plan", "--server-url", "127.0.0.1:1")
    assert away.status == 3
    assert "--server-url" in away.err
