"""What a manifest's author may write, and what he is told when it is something else."""

from pathlib import Path

import pytest

from producer.datasets.forms import Form
from producer.datasets.lanes import DatasetLane
from producer.datasets.manifest import BUNDLED, caps_of, choose, find_manifest, read_manifest
from storage.errors import UsageError


def written(folder: Path, text: str) -> Path:
    path = folder / "datasets.toml"
    path.write_text(text, encoding="utf-8")
    return path


TWO = (
    '[[dataset]]\nname = "B1"\nsource = "file:b1.jsonl"\n[[dataset]]\nname = "B2"\nsource = "file:b2.jsonl"\n'
)


def test_every_key_of_a_table_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[[dataset]]\nname = "B1"\nsource = "file:a/*.jsonl"\nlane = "long"\nform = "text"\n'
        'column = "q"\nmax_samples = 7000\nmax_tokens = 10_000_000\n',
    )
    (dataset,) = read_manifest(path).datasets
    assert (dataset.name, dataset.source, dataset.folder) == ("B1", "file:a/*.jsonl", tmp_path)
    assert (dataset.lane, dataset.form, dataset.column) == (DatasetLane.LONG, Form.TEXT, "q")
    assert (dataset.max_samples, dataset.max_tokens) == (7000, 10_000_000)


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        (
            '[[dataset]]\nname = "B1"\nsource = "file:x.jsonl"\nmax_sample = 5\n',
            "max_sample",
            "`max_samples`",
        ),
        ('[[datasets]]\nname = "B1"\n', "unknown key `datasets`", "`dataset`"),
        ('[[dataset]]\nsource = "file:x.jsonl"\n', "without a name", "name"),
        ('[[dataset]]\nname = "a/b"\nsource = "file:x.jsonl"\n', "`a/b`", "letters"),
        ('[[dataset]]\nname = "zarr.json"\nsource = "file:x.jsonl"\n', "`zarr.json`", "letters"),
        ('[[dataset]]\nname = "all"\nsource = "file:x.jsonl"\n', "called `all`", ""),
        ('[[dataset]]\nname = "B1"\n', "`source` is missing", "file:"),
        ('[[dataset]]\nname = "B1"\nsource = "x.jsonl"\n', "source `x.jsonl`", "file:"),
        ('[[dataset]]\nname = "B1"\nsource = "file:x.jsonl"\nlane = "shrot"\n', "`shrot`", "`short`"),
        ('[[dataset]]\nname = "B1"\nsource = "file:x.jsonl"\nform = "mesages"\n', "`mesages`", "`messages`"),
        ('[[dataset]]\nname = "B1"\nsource = "file:x.jsonl"\nsplit = "train"\n', "`split`", ""),
        ('[[dataset]]\nname = "B1"\nsource = "file:x.jsonl"\nmax_samples = 0\n', "`max_samples`", "cap"),
        ('[[dataset]]\nname = "B1"\nsource = "file:x.jsonl"\nmax_tokens = -5\n', "`max_tokens`", "cap"),
        ('[[dataset]]\nname = "B1"\nsource = "file:x.jsonl"\nmax_samples = true\n', "`max_samples`", "cap"),
        (TWO.replace("B2", "b1"), "two datasets are called `b1`", "case"),
        ("", "names no dataset", "[[dataset]]"),
        ("[[dataset]\n", "not TOML", ""),
    ],
)
def test_a_mistake_is_named_with_what_to_write_instead(
    tmp_path: Path, text: str, said: str, hint: str
) -> None:
    with pytest.raises(UsageError) as raised:
        read_manifest(written(tmp_path, text))
    assert said in raised.value.message
    assert hint in (raised.value.hint or "")


def test_a_manifest_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        find_manifest(tmp_path / "datasets.toml")


def test_a_prompt_file_may_stand_for_its_manifest(tmp_path: Path) -> None:
    (dataset,) = find_manifest(tmp_path / "my prompts.v2.jsonl.gz").datasets
    assert (dataset.name, dataset.source) == ("my-prompts.v2", "file:my prompts.v2.jsonl.gz")


def test_without_a_manifest_the_bundled_prompts_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_manifest(None).bundled
    written(tmp_path, TWO)
    assert [d.name for d in find_manifest(None).datasets] == ["B1", "B2"]


def test_partitions_are_chosen_in_the_manifests_order(tmp_path: Path) -> None:
    manifest = read_manifest(written(tmp_path, TWO))
    assert [d.name for d in choose(manifest, "all")] == ["B1", "B2"]
    assert [d.name for d in choose(manifest, " B2, B1")] == ["B1", "B2"]


@pytest.mark.parametrize(("name", "hint"), [("B3", "did you mean"), ("b2", "`B2`"), ("zzz", "B1, B2, all")])
def test_an_unknown_partition_is_answered_with_the_nearest(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        choose(read_manifest(written(tmp_path, TWO)), name)
    assert f"`{name}`" in raised.value.message
    assert hint in (raised.value.hint or "")


def test_of_two_caps_the_lower_holds(tmp_path: Path) -> None:
    manifest = read_manifest(written(tmp_path, TWO + "max_samples = 50\n"))
    first, second = manifest.datasets
    assert caps_of(first, max_samples=70, max_tokens=None).max_samples == 70
    assert caps_of(second, max_samples=70, max_tokens=9).max_samples == 50
    assert caps_of(second, max_samples=None, max_tokens=9).max_tokens == 9


def test_the_bundled_prompts_are_what_their_manifest_says() -> None:
    for dataset in read_manifest(BUNDLED).datasets:
        assert (dataset.folder / dataset.source.removeprefix("file:")).is_file()
