"""The command `storage`: data on stdout, talk on stderr, and the exit status that scripts rely on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from store_making import add_all, dataset_spec, make_prompts, new_store, whole_store

from storage.cli import size_text


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from storage.cli import main; main()", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EYAS_")}
    environ = {**clean, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "out"
    store, _ = whole_store(path)
    store.begin_dataset(dataset_spec("B2"))
    store.add_prompts("B2", make_prompts(3, "B2"), next_row=5, complete=False, dropped={"too long": 2})
    return path


def test_info_counts_what_is_there(out: Path):
    done = run("info", str(out), "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    first, second = found["datasets"]
    assert (first["prompts"], first["responses"], first["stored"], first["dead"]) == (20, 20, 20, 0)
    assert first["sample_tokens"] > first["prompt_tokens"] > 0
    assert (second["dropped"], second["read"], second["responses"]) == ({"too long": 2}, False, 0)
    assert found["captures"] == ["eagle3"]
    assert found["segments"] == {"prompts": 2, "responses": 2, "states": 2, "failures": 0}
    for kind, size in found["bytes"].items():
        assert size == sum(path.stat().st_size for path in (out / kind).rglob("*") if path.is_file())
    text = run("info", str(out)).stdout
    assert "B2: 2 rows dropped: too long" in text
    assert "org/model" in text


def test_verify_says_all_ok_and_ends_with_0(out: Path):
    done = run("verify", EYAS_OUTPUT_DIR=str(out))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all ok")
    assert "segments=6" in done.stderr.splitlines()[-1]
    content = json.loads(run("verify", str(out), "--json", "--threads", "1").stdout)
    assert content["ok"] is True


def test_the_store_may_be_named_as_producer_names_it(out: Path, tmp_path: Path):
    assert run("verify", "--output-dir", str(out)).returncode == 0
    assert str(out) in run("info", "--output-dir", str(out), EYAS_OUTPUT_DIR=str(tmp_path)).stdout
    assert str(out) in run("info", str(out), EYAS_OUTPUT_DIR=str(tmp_path)).stdout


def test_segments_are_counted_by_their_names_whatever_a_dataset_is_called(tmp_path: Path):
    store = new_store(tmp_path / "out")
    add_all(store, make_prompts(3, "s-00000007"), "s-00000007")
    content = json.loads(run("info", str(store.path), "--json").stdout)
    assert content["segments"] == {"prompts": 1, "responses": 0, "states": 0, "failures": 0}


def test_verify_ends_with_1_when_anything_is_wrong(out: Path, tmp_path: Path):
    import shutil

    shutil.copytree(out, tmp_path / "out")
    path = tmp_path / "out/states/eagle3/s-node1-00000001/states/c.0.0.0"
    path.write_bytes(path.read_bytes()[:-1])
    done = run("verify", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "problem segment.damaged: states/eagle3/s-node1-00000001: " in done.stdout
    assert done.stdout.splitlines()[-1] == "1 problem"


def test_without_a_name_the_store_is_where_producer_puts_it_by_default(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(out, tmp_path / "eyas-data")
    monkeypatch.chdir(tmp_path)
    done = run("verify")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "all ok"


def test_no_store_no_path_and_a_damaged_run_are_errors_with_a_hint(tmp_path: Path):
    for arguments, status, words in [
        (("info", str(tmp_path)), 3, "there is no run in"),
        (("verify",), 2, "`storage verify PATH`"),
        (("compact",), 2, "`storage compact PATH`"),
        (("verifi", str(tmp_path)), 2, "No such command"),
    ]:
        done = run(*arguments)
        assert done.returncode == status
        assert done.stdout == ""
        assert words in done.stderr
        assert "\nhint: " in done.stderr
    (tmp_path / "run.json").write_text("{")
    done = run("verify", str(tmp_path))
    assert done.returncode == 1
    assert "is not JSON" in done.stderr


def test_its_first_words_come_before_the_work(out: Path):
    command = [sys.executable, "-c", "from storage.cli import main; main()", "verify", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "verifying\n"
        process.communicate()


def test_sizes_are_readable():
    texts = [size_text(size) for size in (0, 999, 1000, 999_499, 1_500_000_000, 10**16)]
    assert texts == ["0 B", "999 B", "1 kB", "999 kB", "1.5 GB", "1e+04 TB"]
