"""Which files go out over HTTP and which never, and when one waits for nobody."""

import os
import time

import numpy as np
import pytest

from storage.errors import SpoolLostError
from storage.spool import FETCHED, Spool
from workers.plugin import offering
from workers.plugin.offering import Offered

STATES = np.full((3, 1, 4), 0x3F80, np.uint16)


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool", "node", 1 << 20)


@pytest.fixture
def offered(spool):
    return Offered(spool)


def files(spool):
    return sorted(path.name for path in spool.folder.iterdir())


def age(spool, name, seconds):
    then = time.time() - seconds
    os.utime(spool.folder / name, (then, then))


def test_a_spool_file_goes_out_whole_with_its_size(spool, offered):
    spool.write("one", STATES)
    file, size = offered.open("one")
    with file:
        data = file.read()
    assert data == (spool.folder / "one").read_bytes()
    assert size == len(data) == 512 + STATES.nbytes


@pytest.mark.parametrize(
    "name", ["none", "../secret", "secret", "link", "pipe", "folder", ".one.ab.part", "", "x" * 200]
)
def test_nothing_else_goes_out_or_is_deleted(spool, offered, tmp_path, name):
    (tmp_path / "secret").write_bytes(b"EYASPOOL and more")
    (spool.folder / "secret").write_bytes(b"a password")
    (spool.folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(spool.folder / "pipe")
    (spool.folder / "folder").mkdir()
    (spool.folder / ".one.ab.part").write_bytes(b"EYASPOOL half of it")
    before = files(spool)
    with pytest.raises(SpoolLostError):
        offered.open(name)
    assert not offered.delete(name)
    assert files(spool) == before
    assert (tmp_path / "secret").exists()


def test_a_deleted_file_is_gone(spool, offered):
    spool.write("one", STATES)
    assert offered.delete("one")
    assert files(spool) == []
    assert not offered.delete("one")


def test_a_file_that_comes_after_its_deletion_goes_at_the_next_sweep(spool, offered, monkeypatch):
    assert not offered.delete("late")
    spool.write("late", STATES)
    spool.write("wanted", STATES)
    offered.sweep()
    assert files(spool) == ["wanted"]
    assert not offered.delete("later")
    monkeypatch.setattr(offering, "UNWANTED_S", 0.0)
    offered.sweep()  # nobody who left is so late
    spool.write("later", STATES)
    offered.sweep()
    assert files(spool) == ["later", "wanted"]


def test_files_of_dead_lanes_are_swept_and_those_that_a_sink_reads_are_left(spool, offered):
    for name, seconds in (
        ("old" + FETCHED, offering.FETCHED_S + 10),
        ("young" + FETCHED, offering.FETCHED_S - 10),
        ("for-a-sink", offering.FETCHED_S + 10),
        ("for-nobody", offering.WAITED_FOR_S + 10),
    ):
        spool.write(name, STATES)
        age(spool, name, seconds)
    (spool.folder / ".half.ab.part").write_bytes(b"")
    age(spool, ".half.ab.part", offering.WAITED_FOR_S + 10)
    offered.sweep()
    assert files(spool) == ["for-a-sink", "young" + FETCHED]
