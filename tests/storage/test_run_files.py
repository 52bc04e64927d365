"""`run.json` and `settings.json`: what a run is never changes, what may change changes at once."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_making import SPEC, new_store

from storage.errors import DamagedError, UnavailableError, UnsuitableError, UsageError
from storage.files import NAME, checked_name
from storage.run import Run, RunSpec, Sampling, StatesMode, create_or_check_run, differences, read_run
from storage.settings import DatasetSettings, RunSettings, changing_settings, read_settings, write_settings

SETTINGS = RunSettings(
    server_urls=("http://a:1", "http://b:1"),
    capture_urls=(),
    concurrency={"short": 150, "long": 32},
    max_input_tokens=32_000,
    states=StatesMode.REPLAY,
    capture=SPEC.capture,
    datasets={"B1": DatasetSettings(max_samples=7000), "B2": DatasetSettings(max_tokens=10_000_000)},
)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_run_and_its_settings_come_back_equal(tmp_path: Path):
    run = create_or_check_run(tmp_path, SPEC)
    assert read_run(tmp_path) == run
    assert run.spec == SPEC
    write_settings(tmp_path, SETTINGS)
    assert read_settings(tmp_path) == SETTINGS
    write_settings(tmp_path, replace(SETTINGS, concurrency={"short": 1}))
    assert read_settings(tmp_path).concurrency == {"short": 1}
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "settings.json"}


def test_another_run_is_refused_and_every_difference_named(tmp_path: Path):
    new_store(tmp_path)
    other = replace(SPEC, model="org/other", sampling=Sampling(temperature=0.5), short_max_tokens=7)
    with pytest.raises(UnsuitableError) as caught:
        new_store(tmp_path, other)
    assert caught.value.code == "run.other"
    assert caught.value.exit_status == 3
    for difference in (
        "model: `org/model` → `org/other`",
        "sampling.temperature: `1.0` → `0.5`",
        "short_max_tokens: `100` → `7`",
    ):
        assert difference in caught.value.message
    assert "tokenizer_digest" not in caught.value.message
    assert read_run(tmp_path) == create_or_check_run(tmp_path, SPEC)


def test_a_refused_folder_is_left_as_it_was(tmp_path: Path):
    create_or_check_run(tmp_path, SPEC)
    with pytest.raises(UnsuitableError):
        new_store(tmp_path, replace(SPEC, vocab_size=7))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_states_may_be_captured_later_but_not_inline(tmp_path: Path):
    off = replace(SPEC, states=StatesMode.OFF, capture=None)
    run = create_or_check_run(tmp_path, off)
    assert create_or_check_run(tmp_path, SPEC) == run
    with pytest.raises(UnsuitableError):
        create_or_check_run(tmp_path, replace(SPEC, states=StatesMode.INLINE))


def test_an_edited_run_is_found_out(tmp_path: Path):
    create_or_check_run(tmp_path, SPEC)
    path = tmp_path / "run.json"
    edit(path, spec={**SPEC.to_json(), "model": "org/other"})
    with pytest.raises(DamagedError) as caught:
        read_run(tmp_path)
    assert caught.value.code == "run.edited"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": "x"}', '{"id": 1, "spec": {"model": "x"}}']
)
def test_a_file_that_is_no_run_is_damaged(tmp_path: Path, text: str):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DamagedError):
        read_run(tmp_path)


def test_a_newer_format_is_not_guessed_at(tmp_path: Path):
    create_or_check_run(tmp_path, SPEC)
    edit(tmp_path / "run.json", format=99)
    with pytest.raises(UnsuitableError) as caught:
        read_run(tmp_path)
    assert caught.value.code == "run.newer"


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"server_urls": 3}', '{"states": "sideways"}'])
def test_settings_that_cannot_be_read_are_damaged(tmp_path: Path, content: str):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(DamagedError) as caught:
        read_settings(tmp_path)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f"rm '{tmp_path}/settings.json'")


def test_settings_changed_by_many_at_once_keep_every_change(tmp_path: Path):
    create_or_check_run(tmp_path, SPEC)
    write_settings(tmp_path, replace(SETTINGS, datasets={}))

    def add(number: int) -> None:
        with changing_settings(tmp_path):
            now = read_settings(tmp_path)
            datasets = {**now.datasets, f"B{number}": DatasetSettings(max_samples=number)}
            write_settings(tmp_path, replace(now, datasets=datasets))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(1, 25)))
    assert set(read_settings(tmp_path).datasets) == {f"B{number}" for number in range(1, 25)}


def test_of_two_that_begin_at_once_one_wins_and_both_agree(tmp_path: Path):
    program = (
        "import sys; sys.path.insert(0, 'tests/storage'); from pathlib import Path;"
        "from store_making import SPEC; from storage.run import create_or_check_run;"
        "print('ready', flush=True); sys.stdin.readline();"
        "print(create_or_check_run(Path(sys.argv[1]), SPEC).id)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    ids = {process.communicate("go\n")[0].strip() for process in processes}
    assert len(ids) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_this_user_may_not_write_is_named(tmp_path: Path):
    tmp_path.chmod(0o500)
    root = os.geteuid() == 0
    if root:  # who may write everywhere, and so becomes nobody for a moment
        os.seteuid(65534)
    try:
        with pytest.raises(UnavailableError, match="Permission denied") as caught:
            new_store(tmp_path / "out")
    finally:
        if root:
            os.seteuid(0)
    assert caught.value.code == "output.unwritable"
    assert str(tmp_path / "out") in caught.value.message


def test_a_path_that_is_no_folder_is_not_writable(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UnavailableError) as caught:
            new_store(path)
        assert caught.value.code == "output.unwritable"
        assert caught.value.hint


@pytest.mark.parametrize("name", ["zarr.json", "Zarr.JSON"])
def test_no_folder_takes_the_name_of_the_groups_own_file(name: str):
    with pytest.raises(UsageError):
        checked_name(name, "dataset")


@given(name=st.text(max_size=120))
def test_a_name_is_safe_or_refused(name: str):
    if NAME.fullmatch(name):
        assert checked_name(name, "dataset") == name
        assert "/" not in name
        assert not name.startswith(".")
        assert 0 < len(name.encode()) <= 100
    else:
        with pytest.raises(UsageError):
            checked_name(name, "dataset")


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5))
TREES = st.dictionaries(
    st.sampled_from("abc"), st.one_of(VALUES, st.dictionaries(st.sampled_from("xy"), VALUES))
)


@given(left=TREES, right=TREES)
def test_differences_are_none_exactly_when_nothing_differs(left: dict, right: dict):
    assert differences(left, left) == []
    same = all(left.get(key) == right.get(key) for key in {*left, *right})
    if same:
        assert differences(left, right) == []
    elif not any(isinstance(value, dict) for value in [*left.values(), *right.values()]):
        assert differences(left, right)


def test_a_spec_and_a_run_are_their_fingerprint_and_nothing_else():
    assert RunSpec.from_json(json.loads(json.dumps(SPEC.to_json()))).fingerprint == SPEC.fingerprint
    assert replace(SPEC, vocab_size=7).fingerprint != SPEC.fingerprint
    assert len(SPEC.fingerprint) == 32
    assert Run(id="x", spec=SPEC) == Run(id="x", spec=replace(SPEC))
