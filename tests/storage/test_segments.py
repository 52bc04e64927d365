"""Segments as folders: names, staging, the rename that decides, and what a killed writer leaves."""

import io
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_making import new_store

from storage.catalog import Catalog, place, placed
from storage.codec import Codec
from storage.errors import DamagedError, UnavailableError
from storage.idtable import ABSENT, IdTable
from storage.progress import Progress
from storage.replaced import delete_replaced
from storage.segment import STAGING, Segment, SegmentName, Staging, list_segments, sweep_staging


def commit(output: Path, seq: int, node: str | None = None, **attributes: object) -> bool:
    with Staging(output, "test", Codec.LZ4) as staging:
        staging.plain("id", np.zeros((1, 16), np.uint8))
        staging.finish({"samples": 1, **attributes})
        return staging.commit(output / "responses", SegmentName(node=node, seq=seq))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return new_store(tmp_path / "out").path


@given(
    node=st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    seq=st.integers(1, 10**9),
)
def test_a_name_comes_back_whatever_the_node_is_called(node: str | None, seq: int):
    name = SegmentName(node=node, seq=seq)
    assert SegmentName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text", ["s-1", "s-000000001", "x-00000001", "s-00000001.tmp", "zarr.json", ".staging", "s-", "s--1"]
)
def test_what_is_no_segment_is_passed_over(text: str):
    assert SegmentName.parse(text) is None


def test_a_number_is_taken_once_and_its_segment_stays_as_it_was(output: Path):
    assert commit(output, 1, who="first")
    assert not commit(output, 1, who="second")
    assert Segment(output / "responses", SegmentName(node=None, seq=1)).attributes["who"] == "first"
    assert list((output / STAGING).iterdir()) == []


def test_a_staging_folder_that_is_not_committed_is_removed_and_never_listed(output: Path):
    with Staging(output, "test", Codec.LZ4) as staging:
        staging.plain("id", np.zeros((1, 16), np.uint8))
        staging.finish({"samples": 1})
        assert list_segments(output / "responses") == []
    assert list((output / STAGING).iterdir()) == []


def test_only_staging_folders_that_nobody_touches_are_swept(output: Path):
    for name in ("old", "busy"):
        (output / STAGING / name / "states").mkdir(parents=True)
        (output / STAGING / name / "states" / "c.0").write_bytes(b"x")
        for path in (output / STAGING / name, *(output / STAGING / name).rglob("*")):
            os.utime(path, (1, 1))
    os.utime(output / STAGING / "busy" / "states" / "c.0")
    assert sweep_staging(output, 3600) == 1
    assert [path.name for path in (output / STAGING).iterdir()] == ["busy"]


def test_a_slow_writer_that_is_swept_commits_nothing_of_what_is_left(
    output: Path, monkeypatch: pytest.MonkeyPatch
):
    with Staging(output, "slow", Codec.LZ4) as staging:
        staging.plain("id", np.zeros((1, 16), np.uint8))
        staging.finish({"samples": 1})
        remove = shutil.rmtree

        def commit_first(path: Path, ignore_errors: bool) -> None:
            with pytest.raises(UnavailableError):
                staging.commit(output / "responses", SegmentName(node=None, seq=1))
            remove(path, ignore_errors=ignore_errors)

        monkeypatch.setattr(shutil, "rmtree", commit_first)
        assert sweep_staging(output, 0) == 1
        monkeypatch.undo()
    assert list_segments(output / "responses") == []
    assert list((output / STAGING).iterdir()) == []


def test_age_is_told_by_the_clock_of_the_disk(output: Path, monkeypatch: pytest.MonkeyPatch):
    staged = output / STAGING / "busy"
    staged.mkdir()
    monkeypatch.setattr(time, "time", lambda: 2e9 + staged.stat().st_mtime)  # this machine's is ahead
    assert sweep_staging(output, 3600) == 0
    commit(output, 1)
    commit(output, 2, replaces=["s-00000001"])
    assert delete_replaced(output, [output / "responses"]).segments == 0


def test_a_catalog_sees_each_segment_once_and_not_those_that_were_merged(output: Path):
    catalog = Catalog(output / "responses")
    assert catalog.refresh() == []
    commit(output, 1)
    commit(output, 2)
    assert [str(catalog.segments[at].name) for at in catalog.refresh()] == ["s-00000001", "s-00000002"]
    commit(output, 3, replaces=["s-00000001", "s-00000002"])
    assert [str(catalog.segments[at].name) for at in catalog.refresh()] == ["s-00000003"]
    assert [str(segment.name) for segment in catalog.visible()] == ["s-00000003"]
    assert catalog.last_seq() == 3
    fresh = Catalog(output / "responses")
    assert [str(fresh.segments[at].name) for at in fresh.refresh()] == ["s-00000003"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"attributes": {}}', '{"attributes": {"samples": "x"}}'])
def test_a_segment_whose_metadata_is_not_ours_is_damaged(output: Path, text: str):
    commit(output, 1)
    (output / "responses/s-00000001/zarr.json").write_text(text)
    with pytest.raises(DamagedError):
        Catalog(output / "responses").refresh()


@given(segment=st.integers(0, 2**30), row=st.integers(0, 2**32 - 1))
def test_a_place_is_its_segment_and_row(segment: int, row: int):
    assert placed(place(segment, row)) == (segment, row)


HALVES = st.sampled_from([0, 1, 2**63, 2**64 - 1])
KEYS = st.tuples(HALVES, HALVES).map(lambda pair: pair[0].to_bytes(8, "big") + pair[1].to_bytes(8, "big"))


@settings(max_examples=200)
@given(
    blocks=st.lists(st.lists(st.tuples(KEYS, st.integers(0, 99)), max_size=12), max_size=5),
    asked=st.lists(KEYS, max_size=12),
)
def test_a_table_of_ids_is_a_dict_that_keeps_the_first_value(blocks, asked):
    def rows(keys: list[bytes]) -> np.ndarray:
        return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)

    table, model = IdTable(), {}
    for block in blocks:
        expected = []
        for key, value in block:
            expected.append(key not in model)
            model.setdefault(key, value)
        new = table.add(rows([key for key, _ in block]), np.array([value for _, value in block], np.int64))
        assert new.tolist() == expected
    assert len(table) == len(model)
    assert table.find(rows(asked)).tolist() == [model.get(key, ABSENT) for key in asked]
    known = list(model)
    table.replace(rows(known), np.arange(len(known)) + 500)
    assert table.find(rows(known)).tolist() == [at + 500 for at in range(len(known))]


def test_progress_is_a_line_at_once_and_then_at_its_pace():
    stream = io.StringIO()
    with Progress("verifying", stream) as progress:
        assert stream.getvalue() == "verifying\n"
        for done in range(1000):
            progress.say(segments=f"{done}/1000")
    assert stream.getvalue() == "verifying\nverifying segments=999/1000\n"
