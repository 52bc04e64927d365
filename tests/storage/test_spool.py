"""The spool: what is written comes back bit for bit, and everything else is found out."""

import os
import stat
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import FullError, SpoolLostError, UnsuitableError, UsageError
from storage.sample import SpoolRef
from storage.spool import Spool, check_values, spool_name
from storage.spool_file import HEADER_BYTES

ID = bytes(range(16))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", "node1", 1_000_000)


def tensor(rows: int = 20, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 0x7F80, (rows, 3, 16), dtype=np.uint16)


def whole(spool: Spool, ref: SpoolRef, buffer_bytes: int = 1000) -> np.ndarray:
    return np.concatenate([block.copy() for block in spool.blocks(ref, buffer_bytes)])


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 20)),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    buffer_bytes=st.integers(1, 5000),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_written_in_any_pieces_come_back_in_any_blocks(
    tmp_path_factory, shape, cuts, buffer_bytes, seed
):
    spool = Spool(tmp_path_factory.mktemp("spool"), "n", 1 << 30)
    states = np.random.default_rng(seed).integers(0, 2**16, shape, dtype=np.uint16)
    with spool.writer("one", shape) as writer:
        for piece in np.split(states, sorted(min(cut, shape[0]) for cut in cuts)):
            writer.write(piece)
        ref = writer.commit()
    assert ref.shape == shape
    assert ref.crc32 == zlib.crc32(states.astype("<u2").tobytes())
    assert np.array_equal(whole(spool, ref, buffer_bytes), states)


def test_the_file_is_a_header_and_the_raw_little_endian_bits(spool: Spool):
    states = tensor()
    spool.write("one", states)
    data = (spool.folder / "one").read_bytes()
    assert data[:8] == b"EYASPOOL"
    assert data[HEADER_BYTES:] == states.astype("<u2").tobytes()


def test_only_this_user_may_read_the_spool(spool: Spool):
    spool.write("one", tensor())
    assert stat.S_IMODE(spool.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((spool.folder / "one").stat().st_mode) == 0o600


def test_names_are_unique_for_each_attempt_and_lead_nowhere_else(spool: Spool):
    assert spool_name(ID) != spool_name(ID)
    assert spool_name(ID).startswith(ID.hex())
    for name in ("../one", "a/b", "", ".hidden", "x" * 200):
        with pytest.raises(UsageError):
            spool.writer(name, (1, 1, 1))
        with pytest.raises(SpoolLostError):
            whole(spool, SpoolRef(node="node1", name=name, shape=(1, 1, 1), crc32=0))


def test_a_reference_cannot_delete_a_file_outside_the_spool(spool: Spool):
    outside = spool.folder.parent / "precious"
    outside.write_text("x")
    spool.delete(SpoolRef(node="node1", name="../precious", shape=(1, 1, 1), crc32=0))
    assert outside.exists()


@pytest.mark.parametrize("damage", ["gone", "cut", "longer", "flipped", "header", "other"])
def test_a_damaged_file_is_lost(spool: Spool, damage: str):
    ref = spool.write("one", tensor())
    path = spool.folder / "one"
    data = bytearray(path.read_bytes())
    match damage:
        case "gone":
            path.unlink()
        case "cut":
            path.write_bytes(data[:-2])
        case "longer":
            path.write_bytes(data + b"xx")
        case "flipped":
            data[HEADER_BYTES + 77] ^= 1
            path.write_bytes(data)
        case "header":
            path.write_bytes(bytes(HEADER_BYTES) + data[HEADER_BYTES:])
        case "other":
            spool.write("one", tensor(seed=1))
    with pytest.raises(SpoolLostError) as caught:
        whole(spool, ref)
    assert caught.value.code == ("spool.missing" if damage == "gone" else "spool.lost")
    with pytest.raises(SpoolLostError):
        spool.check_values(ref)


def test_a_reference_with_another_shape_or_node_is_lost(spool: Spool):
    ref = spool.write("one", tensor())
    for other in (replace(ref, shape=(20, 16, 3)), replace(ref, node="node2")):
        with pytest.raises(SpoolLostError):
            whole(spool, other)


def test_a_link_in_the_spool_is_not_followed(spool: Spool):
    ref = spool.write("one", tensor())
    (spool.folder / "one").rename(spool.folder / "two")
    (spool.folder / "one").symlink_to(spool.folder / "two")
    with pytest.raises(SpoolLostError):
        whole(spool, ref)


def test_an_aborted_or_incomplete_write_leaves_nothing(spool: Spool):
    with spool.writer("one", (20, 3, 16)) as writer:
        writer.write(tensor(5))
    with spool.writer("two", (20, 3, 16)) as writer:
        writer.write(tensor(5))
        with pytest.raises(ValueError, match="5 of 20"):
            writer.commit()
    assert list(spool.folder.iterdir()) == []


def test_the_limit_counts_what_is_being_written_too(tmp_path: Path):
    size = HEADER_BYTES + 20 * 3 * 16 * 2
    spool, other = (Spool(tmp_path / "spool", "node1", 2 * size) for _ in range(2))
    first = spool.write("one", tensor())
    with other.writer("two", (20, 3, 16)) as writer:
        assert spool.used_bytes() == 2 * size
        with pytest.raises(FullError) as caught:
            spool.writer("three", (20, 3, 16))
        assert caught.value.code == "spool.full"
        writer.write(tensor())
        writer.commit()
    spool.delete(first)
    spool.write("three", tensor())


def test_a_file_system_without_room_is_reported_and_nothing_is_left(tmp_path: Path):
    program = (
        "import resource, sys; from pathlib import Path; import numpy as np;"
        "from storage.spool import Spool; from storage.errors import FullError;"
        "spool = Spool(Path(sys.argv[1]), 'n', 1 << 40);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000));\n"
        "try: spool.write('one', np.ones((100, 4, 64), np.uint16))\n"
        "except FullError as error: print(error.code)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "spool")]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "spool.full"
    assert list((tmp_path / "spool").iterdir()) == []


def test_the_sweep_takes_old_files_and_only_the_spools_own(spool: Spool):
    spool.write("old", tensor())
    spool.write("new", tensor())
    (spool.folder / ".x.part").write_bytes(b"left by a killed writer")
    (spool.folder / ".bashrc").write_bytes(b"not ours")
    for name in ("old", ".x.part", ".bashrc"):
        os.utime(spool.folder / name, (1, 1))
    assert spool.sweep(3600) == 2
    assert {path.name for path in spool.folder.iterdir()} == {"new", ".bashrc"}


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UnsuitableError):
        Spool(tmp_path / "link", "node1", 1)


def test_a_spool_folder_that_was_cleaned_away_comes_back(spool: Spool):
    spool.folder.rmdir()
    assert spool.used_bytes() == 0
    states = tensor()
    assert np.array_equal(whole(spool, spool.write("one", states)), states)


def test_values_no_forward_pass_gives_are_counted():
    one, inf, nan, subnormal = 0x3F80, 0x7F80, 0xFFC1, 0x0001
    states = np.full((4, 2, 3), one, np.uint16)
    assert check_values(states).ok
    states[0, 0, 0], states[0, 1, 2] = inf, nan
    states[1, 0] = [0x0000, 0x8000, 0x0000]  # zeros of both signs
    states[2, 0] = [0, subnormal, 0]
    found = check_values(states)
    assert (found.rows, found.non_finite, found.zero_rows) == (4, 2, 1)
    assert not found.ok


def test_the_spool_needs_nothing_but_numpy():
    program = (
        "import sys, storage.spool;"
        "print(sorted({'zarr', 'numcodecs', 'google_crc32c', 'click', 'redis'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_tensor_that_can_never_fit_is_said_to_be_one(tmp_path: Path):
    spool = Spool(tmp_path / "small", "node1", 1000)
    with pytest.raises(FullError, match="never fits") as caught:
        spool.writer("a", (10, 10, 10))
    assert caught.value.hint == "raise EYAS_SPOOL_MAX_GB above `2.512e-06`"
