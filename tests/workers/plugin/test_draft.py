"""A file that grows by position: any order of rows gives one tensor, and failures leave none."""

import errno
import os
import tempfile
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import EyasError, FullError, UnavailableError
from storage.spool import Spool
from workers.plugin import draft as drafts
from workers.plugin.rows import Part
from workers.plugin.writing import Writer

HIDDEN = 3
PUTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.booleans()), max_size=30)


@pytest.fixture
def writer(tmp_path):
    made = Writer(Spool(tmp_path / "spool", "node", 1 << 20))
    yield made
    made.close()


def numbered(rng, count):
    return rng.integers(0, 1 << 16, (count, 2 * HIDDEN), np.uint16), rng.integers(
        0, 1 << 16, (count, HIDDEN), np.uint16
    )


def part(start, count, value=1):
    return Part(start=start, count=count, aux=None, final=np.full((count, HIDDEN), value, np.uint16))


def begin(writer, name="file", columns=(0,)):
    return writer.draft(name=name, columns=columns, hidden_size=HIDDEN)


def files(writer):
    return sorted(path.name for path in writer._spool.folder.iterdir())


@given(
    PUTS,
    st.integers(1, 50),
    st.sampled_from([(0, 1, 2), (0, 2), (1,), (2,)]),
    st.sampled_from([1, 60, 1 << 20]),
)
@settings(deadline=None)
def test_what_comes_later_replaces_what_came_before(puts, total, columns, gathered):
    rng = np.random.default_rng(len(puts))
    covered, model = np.zeros(64, bool), np.zeros((64, 3, HIDDEN), np.uint16)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "GATHERED_BYTES", gathered)
        patch.setattr(drafts, "BLOCK_BYTES", 5 * len(columns) * HIDDEN * 2)
        spool = Spool(Path(folder), "node", 1 << 20)
        writer = Writer(spool)
        draft = begin(writer, columns=columns)
        for start, count, single in puts:
            aux, final = numbered(rng, count)
            if single:
                for i in range(count):
                    draft.put_row(start + i, aux[i], final[i])
            else:
                draft.put(Part(start=start, count=count, aux=aux, final=final))
            model[start : start + count, :2] = aux.reshape(count, 2, HIDDEN)
            model[start : start + count, 2] = final
            covered[start : start + count] = True
        assert draft.covered.count(total) == covered[:total].sum()
        if covered[:total].all():
            ref = draft.finish(total).result(timeout=20)
            wanted = model[:total, list(columns)]
            assert ref.crc32 == zlib.crc32(wanted.tobytes())
            assert (np.concatenate([block.copy() for block in spool.blocks(ref)]) == wanted).all()
            assert (Path(folder) / "file").stat().st_size == 512 + wanted.nbytes
        draft.abort()
        writer.close()
        assert writer.budget.held_bytes == 0
        assert [path.name for path in Path(folder).iterdir()] == ["file"] * bool(covered[:total].all())


def test_nothing_of_a_file_is_seen_before_it_is_whole(writer):
    draft = begin(writer)
    draft.put(part(0, 5))
    writer._threads.submit(lambda: None).result()
    assert all(name.startswith(".file.") for name in files(writer))
    draft.finish(5).result(timeout=20)
    assert files(writer) == ["file"]


def test_a_spool_without_room_fails_the_file_at_its_next_rows_and_leaves_none(tmp_path):
    writer = Writer(Spool(tmp_path / "spool", "node", 1000))
    draft = begin(writer)
    draft.put(part(0, 50))
    draft.put(part(50, 50))
    with pytest.raises(FullError):
        draft.finish(100).result(timeout=20)
    with pytest.raises(FullError):
        draft.put(part(100, 50))
    writer.close()
    assert files(writer) == []
    assert writer.budget.held_bytes == 0


def test_a_growing_file_reserves_ahead_only_what_there_is_room_for(tmp_path):
    row = HIDDEN * 2
    writer = Writer(Spool(tmp_path / "spool", "node", 512 + 110 * row))
    draft = begin(writer)
    draft.put(part(0, 100))
    draft.put(part(100, 10))  # half as much again would pass the limit
    assert draft.finish(110).result(timeout=20).shape == (110, 1, HIDDEN)
    writer.close()


def test_a_full_disk_is_an_error_of_the_request(writer, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    draft = begin(writer)
    draft.put(part(0, 5))
    writer._threads.submit(lambda: None).result()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FullError):
        draft.put(part(5, 5)), draft.finish(10).result(timeout=20)
    writer.close()
    assert files(writer) == []


def test_a_file_that_cannot_be_given_its_name_is_an_error_and_none_is_left(writer):
    draft = begin(writer)
    draft.put(part(0, 5))
    (writer._spool.folder / "file").mkdir()
    with pytest.raises(UnavailableError):
        draft.finish(5).result(timeout=20)
    writer.close()
    assert files(writer) == ["file"]


def test_a_file_that_cannot_even_be_closed_is_an_error_and_not_waited_for(writer):
    draft = begin(writer)
    draft.put(part(0, 4))
    deadline = time.monotonic() + 20
    while draft._handle is None or draft._busy:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.close(draft._handle)  # from now on all that is done with it fails, as on a disk that is gone
    with pytest.raises(UnavailableError, match="Bad file descriptor"):
        draft.finish(4).result(timeout=20)
    assert files(writer) == []


def test_a_fault_of_ours_is_said_and_not_waited_for(writer, monkeypatch):
    monkeypatch.setattr(Part, "fill", lambda *_: 1 / 0)
    draft = begin(writer)
    draft.put(part(0, 5))
    with pytest.raises(EyasError, match="ZeroDivisionError"):
        draft.finish(5).result(timeout=20)
    assert writer.budget.held_bytes == 0


@pytest.mark.parametrize("ending", [False, True])
def test_what_is_given_up_is_never_written_and_its_memory_is_free_at_once(writer, ending):
    release = threading.Event()
    for _ in range(2):
        writer._threads.submit(release.wait)
    draft = begin(writer)
    draft.put(part(0, 5))
    draft.put_row(5, None, np.ones(HIDDEN, np.uint16))
    future = draft.finish(6) if ending else None
    draft.abort()
    assert writer.budget.held_bytes == 0
    release.set()
    if future is not None:
        with pytest.raises(EyasError, match="aborted"):
            future.result(timeout=20)
    with pytest.raises(EyasError, match="aborted"):
        draft.put(part(6, 1))
    writer.close()
    assert files(writer) == []
