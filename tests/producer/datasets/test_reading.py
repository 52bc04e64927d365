"""Prompts into a real store: on from where it ends, whatever ended it."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from producer.datasets.manifest import find_manifest
from producer.datasets.preparing import Prepared, prepare
from producer.datasets.prompts import Limits
from producer.datasets.reading import Stored, enough, read_into
from producer.datasets.template import Template
from storage.errors import UnsuitableError, UsageError
from storage.run import CaptureSpec, RunSpec, Sampling, StatesMode
from storage.sample import Finish
from storage.store import Store
from tests.producer.small import write_lines

LIMITS = Limits(vocab_size=320, max_input_tokens=512)


def spec(model: Path) -> RunSpec:
    return RunSpec(
        model=str(model),
        tokenizer_digest="t",
        template_digest="c",
        vocab_size=320,
        sampling=Sampling(),
        short_max_tokens=256,
        long_max_tokens=256,
        states=StatesMode.REPLAY,
        capture=CaptureSpec(name="final", hs_indices=(8,), norm="post", hidden_size=64),
    )


@pytest.fixture
def store(tmp_path: Path, model: Path) -> Store:
    return Store.create(tmp_path / "out", spec(model))


def prepared(path: Path) -> Prepared:
    return prepare(find_manifest(path).datasets[0])


def read(store: Store, one: Prepared, template: Template, most: int | None = None) -> Stored:
    return read_into(store, one, template, replace(LIMITS, max_prompts=most), progress=lambda batch: None)


def rows(count: int, first: int = 0) -> list[object]:
    """Every third is a repetition, every fifth is broken."""
    return [
        "{broken" if n % 5 == 4 else {"prompt": f"row {n % 3 and n}"} for n in range(first, first + count)
    ]


def ids(store: Store, name: str = "rows") -> list[bytes]:
    return [prompt.id for prompt in store.prompts(name)]


def test_reading_in_parts_gives_what_reading_at_once_gives(
    tmp_path: Path, store: Store, template: Template, model: Path
) -> None:
    one = prepared(write_lines(tmp_path / "rows.jsonl", rows(5000)))
    for most in (7, 8, 2500, None):
        stored = read(store, one, template, most)
    whole = Store.create(tmp_path / "whole", spec(model))
    assert read(whole, one, template).new == stored.prompts == 4000
    assert ids(store) == ids(whole)
    assert len(set(ids(whole))) == 4000
    assert [p.source_row for p in store.prompts("rows")] == [n for n in range(5000) if n % 5 != 4]
    assert store.reading_state("rows").dropped == whole.reading_state("rows").dropped == {"json.broken": 1000}


def test_a_raised_cap_adds_only_the_more(tmp_path: Path, store: Store, template: Template) -> None:
    one = prepared(write_lines(tmp_path / "rows.jsonl", rows(500)))
    assert read(store, one, template, 70).new == 70
    assert enough(store, one, replace(LIMITS, max_prompts=70))
    assert enough(store, one, replace(LIMITS, max_prompts=50))
    assert not enough(store, one, replace(LIMITS, max_prompts=74))
    before = ids(store)
    assert read(store, one, template, 74).new == 4
    assert ids(store)[:70] == before


def test_a_source_at_its_end_is_enough_whatever_the_cap(
    tmp_path: Path, store: Store, template: Template
) -> None:
    one = prepared(write_lines(tmp_path / "rows.jsonl", rows(50)))
    assert not enough(store, one, LIMITS)
    read(store, one, template)
    assert enough(store, one, LIMITS)
    assert enough(store, one, replace(LIMITS, max_prompts=10_000))


def test_a_token_cap_is_reached_by_prompts_alone(tmp_path: Path, store: Store, template: Template) -> None:
    one = prepared(write_lines(tmp_path / "rows.jsonl", rows(500)))
    capped = replace(LIMITS, max_tokens=1000)
    first = read_into(store, one, template, capped, progress=lambda batch: None)
    assert 1000 <= first.tokens < 1100
    assert enough(store, one, capped)
    assert not enough(store, one, replace(LIMITS, max_tokens=1200))


def test_tokenized_rows_are_responses_with_finish_given(
    tmp_path: Path, store: Store, template: Template
) -> None:
    given = [{"input_ids": [9, 8, 7, n], "loss_mask": [0, 0, 1, 1]} for n in range(3)]
    one = prepared(write_lines(tmp_path / "rows.jsonl", given))
    read(store, one, template)
    for prompt, row in zip(store.prompts("rows"), given, strict=True):
        response = store.response(prompt.id)
        assert response.finish is Finish.GIVEN
        assert response.tokens.tolist() == row["input_ids"]
        assert response.prompt_length == 2
        assert response.spans == prompt.spans


def test_a_source_that_changed_is_refused_naming_what_did(
    tmp_path: Path, store: Store, template: Template
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", rows(50))
    read(store, prepared(path), template)
    write_lines(path, rows(60))
    with pytest.raises(UnsuitableError, match="source_digest"):
        read(store, prepared(path), template)


def test_the_same_bytes_under_another_name_are_the_same_source(
    tmp_path: Path, store: Store, template: Template
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", rows(50))
    read(store, prepared(path), template)
    moved = path.rename(tmp_path / "rows.ndjson")
    again = prepare(find_manifest(moved).datasets[0], store.dataset_spec("rows"))
    assert read(store, again, template).new == 0


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "none of the first 1 rows"),
        (["[1]"], "none of the first 1 rows"),
        ([{"body": "hi", "n": 1}], "no known column in"),
        (["", " "], "holds no row"),
    ],
)
def test_a_source_nothing_can_be_made_of_is_named_before_anything_is_read(
    tmp_path: Path, lines: list[object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        prepared(write_lines(tmp_path / "rows.jsonl", lines))


def test_a_lane_that_does_not_go_with_the_form_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "ids.jsonl", [{"input_ids": [1]}])
    write_lines(tmp_path / "text.jsonl", [{"prompt": "hi"}])
    for name, lane in (("ids", "short"), ("text", "capture")):
        manifest = tmp_path / f"{name}.toml"
        manifest.write_text(f'[[dataset]]\nname = "B"\nsource = "file:{name}.jsonl"\nlane = "{lane}"\n')
        with pytest.raises(UsageError, match=f"cannot go to lane `{lane}`"):
            prepare(find_manifest(manifest).datasets[0])


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.producer.datasets.test_reading import LIMITS, prepared, spec
from producer.datasets.reading import read_into
from producer.datasets.model_folder import find_model
from producer.datasets.template import Template
from storage.store import Store

model, out, source, batches = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
left = [batches]
def kill(batch):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
template = Template(find_model(str(model)))
read_into(Store.create(out, spec(model)), prepared(source), template, LIMITS, progress=kill)
"""


def test_a_killed_reading_goes_on_and_repeats_nothing(
    tmp_path: Path, template: Template, model: Path
) -> None:
    source = write_lines(tmp_path / "rows.jsonl", rows(5500))
    arguments = [sys.executable, "-c", KILLED, str(model), str(tmp_path / "out"), str(source), "2"]
    root = str(Path(__file__).parents[3])
    died = subprocess.run(arguments, env={**os.environ, "PYTHONPATH": root}, check=False)
    assert died.returncode == -signal.SIGKILL
    store = Store.open(tmp_path / "out")
    held = store.reading_state("rows").count
    assert 2000 < held < 4400
    assert read(store, prepared(source), template).new == 4400 - held
    undisturbed = Store.create(tmp_path / "whole", spec(model))
    read(undisturbed, prepared(source), template)
    assert ids(store) == ids(undisturbed)
