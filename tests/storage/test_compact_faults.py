"""Compaction when things break: killed anywhere, no room, not writable, the folder gone or another's."""

import errno
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from compact_making import assert_all_there, compacted, many_segments, names, quiet, storage_command
from store_making import CAPTURE, SPEC, make_prompts, make_response, make_states, new_store

from storage.compact import compact
from storage.compaction import FolderCompaction
from storage.errors import FullError, RunReplacedError, UnavailableError
from storage.progress import Progress
from storage.segment import Segment
from storage.store import Store
from storage.verify import verify
from tests.properties.killed import KillAt, killed


class Meanwhile(Progress):
    """A progress that does something once, after so many chunks."""

    def __init__(self, what: Callable[[], object], chunks: int = 1) -> None:
        super().__init__("compacting", io.StringIO())
        self.what, self.left = what, chunks

    def say(self, **values: object) -> None:
        if values:
            self.left -= 1
            if self.left == 0:
                self.what()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB; skipped where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kept_s", [0.0, 86400.0])
def test_a_compaction_killed_before_any_of_its_steps_loses_nothing(tmp_path: Path, kept_s: float):
    store, _, responses = many_segments(tmp_path / "out", samples=8)
    step, done = 1, False
    while not done:
        shutil.copytree(store.path, tmp_path / "copy")
        done = killed(lambda: compact(tmp_path / "copy", quiet(), kept_s=kept_s) and None, KillAt(step=step))
        assert_all_there(tmp_path / "copy", responses)
        assert verify(tmp_path / "copy", quiet()).problems == ()
        compacted(tmp_path / "copy", kept_s=0)
        assert_all_there(tmp_path / "copy", responses)
        assert names(tmp_path / "copy/responses") == ["s-00000003"]
        Store.open(tmp_path / "copy").sweep_staging(0)
        assert list((tmp_path / "copy/.staging").iterdir()) == []
        shutil.rmtree(tmp_path / "copy")
        step += 53
    assert step > 5 * 53


def test_a_merge_that_does_not_fit_says_what_it_needs_and_changes_nothing(disk: Path):
    store, _, responses = many_segments(disk / "out")
    before = names(store.path / "responses")
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free - 20_000))
    done = storage_command("compact", str(store.path))
    assert done.returncode == 1
    assert f"bytes of `{store.path}/responses`" in done.stderr
    assert "are free" in done.stderr
    assert "then run the same command again" in done.stderr
    assert names(store.path / "responses") == before
    ballast.unlink()
    assert storage_command("compact", str(store.path)).returncode == 0
    assert_all_there(store.path, responses)


def test_a_disk_that_fills_in_mid_merge_leaves_the_store_as_it_was(disk: Path):
    store, _, responses = many_segments(disk / "out")

    def fill() -> None:
        with (disk / "ballast").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    with pytest.raises(FullError) as caught:
        compact(store.path, Meanwhile(fill))
    assert caught.value.code == "output.full"
    assert f"`{store.path}`" in caught.value.message
    assert list((store.path / ".staging").iterdir()) == []
    assert_all_there(store.path, responses)
    (disk / "ballast").unlink()
    compacted(store.path, kept_s=0)
    assert_all_there(store.path, responses)


def test_a_store_that_may_only_be_read_is_an_error_that_names_it(disk: Path):
    store, _, responses = many_segments(disk / "out", samples=8)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = storage_command("compact", str(store.path))
    assert done.returncode == 3
    assert f"`{store.path}/responses` cannot be written: Read-only file system" in done.stderr
    assert "\nhint: " in done.stderr
    assert_all_there(store.path, responses)


def test_a_folder_that_vanishes_in_mid_merge_is_not_made_again(tmp_path: Path):
    store, _, responses = many_segments(tmp_path / "out", samples=8)
    with pytest.raises(UnavailableError) as caught:
        compact(store.path, Meanwhile(lambda: store.path.rename(tmp_path / "elsewhere")))
    assert str(store.path) in caught.value.message
    assert not store.path.exists()
    assert_all_there(tmp_path / "elsewhere", responses)


def test_nothing_is_merged_into_a_run_that_was_begun_in_the_folders_place(tmp_path: Path):
    store, _, responses = many_segments(tmp_path / "out", samples=8)

    def replace() -> None:
        store.path.rename(tmp_path / "elsewhere")
        new_store(store.path)

    with pytest.raises((RunReplacedError, UnavailableError)):
        compact(store.path, Meanwhile(replace))
    assert names(store.path / "responses") == []
    assert_all_there(tmp_path / "elsewhere", responses)


def test_nothing_of_an_old_run_is_committed_into_a_new_one_in_its_place(tmp_path: Path):
    """As a sink does that has outlived its folder: it still holds results, and the path is there."""
    store, spool, _ = many_segments(tmp_path / "out", samples=4)
    more = [make_response(prompt, seed=8) for prompt in store.prompts("B1")]
    shutil.rmtree(store.path)
    with pytest.raises(UnavailableError) as gone:
        store.commit_responses([make_response(prompt) for prompt in make_prompts(9)])
    assert gone.value.code == "output.unwritable"
    assert not store.path.exists()
    other = new_store(store.path, SPEC)
    for commit in (
        lambda: store.commit_responses([make_response(prompt) for prompt in make_prompts(9)]),
        lambda: store.commit_states([make_states(response, spool) for response in more], spool),
        lambda: store.add_prompts("B1", [], next_row=9, complete=True, dropped={}),
        lambda: store.write_facts("f9", {}),
        lambda: store.delete_replaced(),
    ):
        with pytest.raises(RunReplacedError) as caught:
            commit()
        assert caught.value.code == "run.replaced"
        assert store.run.id in caught.value.message
        assert other.run.id in caught.value.message
        assert caught.value.hint
    assert list((store.path / ".staging").iterdir()) == []
    assert not (store.path / "states" / CAPTURE.name).exists()
    assert json.loads((store.path / "run.json").read_text())["id"] == other.run.id


def test_a_moments_trouble_with_the_disk_leaves_no_segment_out_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, _, _ = many_segments(tmp_path / "out", samples=8)
    folder = FolderCompaction(store.path, store.path / "responses", store.codec, node="node1")
    visible = list(folder.look().values())

    def fails(_: Segment) -> int:
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as trouble:
        trouble.setattr(Segment, "stored_bytes", fails)
        assert folder.candidates(visible, {}) == []
    assert [one.name for one in folder.candidates(visible, {})] == ["s-00000001", "s-00000002"]
