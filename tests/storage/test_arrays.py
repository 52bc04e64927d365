"""Arrays as files: what we write, Zarr and TensorStore read, and the other way round."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from storage.arrays import ArrayFile, Layout, plain_layout, sharded_layout, write_plain
from storage.codec import Codec, chosen_codec
from storage.errors import DamagedError, UsageError
from storage.shard import ShardWriter

DTYPES = st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.float64])


def write_sharded(folder: Path, values: np.ndarray, layout: Layout, cuts: list[int] | None = None) -> None:
    with ShardWriter(folder, layout) as writer:
        for piece in np.split(values, sorted(min(cut, len(values)) for cut in cuts or [])):
            writer.append(piece)
        writer.close()


def read_by_tensorstore(folder: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}
    return tensorstore.open(spec, read=True).result().read().result()


def values_of(shape: tuple[int, ...], dtype: type, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    high = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 2**31
    return rng.integers(0, high, shape).astype(dtype)


@settings(max_examples=60)
@given(
    rows=st.integers(0, 60),
    row_shape=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    dtype=DTYPES,
    codec=st.sampled_from(list(Codec)),
    chunk_bytes=st.integers(1, 400),
    shard_bytes=st.integers(1, 2000),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    slices=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_sharded_array_reads_the_same_by_us_zarr_and_tensorstore(
    tmp_path_factory, rows, row_shape, dtype, codec, chunk_bytes, shard_bytes, cuts, slices, seed
):
    folder = tmp_path_factory.mktemp("array") / "a"
    values = values_of((rows, *row_shape), dtype, seed)
    layout = sharded_layout(
        values.shape, values.dtype, codec, chunk_bytes=chunk_bytes, shard_bytes=shard_bytes
    )
    write_sharded(folder, values, layout, cuts)
    ours = ArrayFile(folder)
    assert np.array_equal(ours.read(), values)
    for start, stop in slices:
        assert np.array_equal(ours.read(start, stop), values[start:stop])
    by_zarr = zarr.open_array(str(folder), mode="r")
    assert by_zarr.dtype == values.dtype
    assert np.array_equal(by_zarr[:], values)
    assert np.array_equal(read_by_tensorstore(folder), values)


@settings(max_examples=30)
@given(
    rows=st.integers(0, 20),
    row_shape=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    dtype=DTYPES,
    seed=st.integers(0, 2**32 - 1),
)
def test_a_plain_array_reads_the_same_by_us_zarr_and_tensorstore(
    tmp_path_factory, rows, row_shape, dtype, seed
):
    folder = tmp_path_factory.mktemp("array") / "a"
    values = values_of((rows, *row_shape), dtype, seed)
    write_plain(folder, values)
    assert np.array_equal(ArrayFile(folder).read(), values)
    assert np.array_equal(zarr.open_array(str(folder), mode="r")[:], values)
    assert np.array_equal(read_by_tensorstore(folder), values)


@pytest.mark.parametrize("codec", list(Codec))
def test_the_metadata_is_what_zarr_itself_writes(tmp_path: Path, codec: Codec):
    layout = sharded_layout((100, 4, 8), np.dtype("<u2"), codec, chunk_bytes=640, shard_bytes=3200)
    blosc = [BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=2)]
    zarr.create_array(
        str(tmp_path / "a"),
        shape=layout.shape,
        dtype="uint16",
        chunks=(layout.chunk_rows, 4, 8),
        shards=(layout.shard_rows, 4, 8),
        filters=None,
        compressors=[*(blosc if codec is Codec.LZ4 else []), Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        fill_value=0,
    )
    assert layout.to_json() == json.loads((tmp_path / "a" / "zarr.json").read_bytes())


def test_the_metadata_of_a_plain_array_is_what_zarr_itself_writes(tmp_path: Path):
    zarr.create_array(
        str(tmp_path / "a"),
        shape=(5, 16),
        dtype="uint8",
        chunks=(5, 16),
        filters=None,
        compressors=[Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        fill_value=0,
    )
    stored = json.loads((tmp_path / "a" / "zarr.json").read_bytes())
    assert plain_layout((5, 16), np.dtype("u1")).to_json() == stored


@pytest.mark.parametrize("separator", ["/", "."])
def test_what_another_tool_has_written_otherwise_is_read_too(tmp_path: Path, separator: str):
    values = values_of((50, 4, 8), np.uint16, 0)
    array = zarr.create_array(
        str(tmp_path / "a"),
        shape=values.shape,
        dtype="uint16",
        chunks=(7, 2, 8),
        compressors=[ZstdCodec(level=1)],
        chunk_key_encoding={"name": "default", "separator": separator},
    )
    array[:] = values
    assert np.array_equal(ArrayFile(tmp_path / "a").read(3, 41), values[3:41])


def test_a_chunk_of_zeros_that_zarr_did_not_write_is_read_as_zeros(tmp_path: Path):
    values = values_of((40, 8), np.uint16, 0)
    values[10:20] = 0
    array = zarr.create_array(
        str(tmp_path / "a"),
        shape=values.shape,
        dtype="uint16",
        chunks=(10, 8),
        shards=(40, 8),
        filters=None,
        compressors=[BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=2), Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        config={"write_empty_chunks": False},
    )
    array[:] = values
    assert np.array_equal(ArrayFile(tmp_path / "a").read(), values)


@settings(max_examples=200)
@given(
    rows=st.integers(1, 100_000),
    row_bytes=st.sampled_from([2, 8, 4 * 64 * 2, 4 * 1152 * 2, 4 * 7168 * 2, 64 * 8192 * 2]),
)
def test_padding_of_the_last_chunk_is_at_most_a_twentieth_when_a_chunk_has_rows_to_choose_from(
    rows, row_bytes
):
    layout = sharded_layout(
        (rows, row_bytes // 2), np.dtype("<u2"), Codec.NONE, chunk_bytes=4 << 20, shard_bytes=96 << 20
    )
    assert layout.chunk_rows * row_bytes <= max(4 << 20, row_bytes)
    assert layout.shard_rows is not None
    assert layout.shard_rows % layout.chunk_rows == 0
    padded = -rows % layout.chunk_rows
    if row_bytes <= 4 * 7168 * 2:
        assert padded <= 0.05 * rows


@pytest.mark.parametrize("codec", list(Codec))
def test_every_flipped_bit_is_found(tmp_path: Path, codec: Codec):
    values = values_of((40, 4, 8), np.uint16, 0)
    layout = sharded_layout(values.shape, values.dtype, codec, chunk_bytes=640, shard_bytes=1 << 20)
    write_sharded(tmp_path / "a", values, layout)
    (path,) = (tmp_path / "a").glob("c.*")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [0, len(whole) - 1, *rng.integers(0, len(whole), 60).tolist()]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"c\.0"):
            ArrayFile(tmp_path / "a").read()


@pytest.mark.parametrize("left", [0, 3, 60, 500])
def test_a_shard_cut_short_is_damaged(tmp_path: Path, left: int):
    values = values_of((40, 4, 8), np.uint16, 0)
    layout = sharded_layout(values.shape, values.dtype, Codec.LZ4, chunk_bytes=640, shard_bytes=1 << 20)
    write_sharded(tmp_path / "a", values, layout)
    (path,) = (tmp_path / "a").glob("c.*")
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DamagedError):
        ArrayFile(tmp_path / "a").read()


def test_a_writer_that_is_given_too_few_or_too_many_rows_says_so(tmp_path: Path):
    layout = sharded_layout((10, 4), np.dtype("<u2"), Codec.LZ4, chunk_bytes=16, shard_bytes=64)
    with ShardWriter(tmp_path / "a", layout) as writer:
        writer.append(np.zeros((9, 4), np.uint16))
        with pytest.raises(ValueError, match="9 of 10"):
            writer.close()
    with ShardWriter(tmp_path / "b", layout) as writer, pytest.raises(ValueError, match="more than 10"):
        writer.append(np.zeros((12, 4), np.uint16))


def test_an_unknown_codec_is_named_with_the_nearest():
    assert chosen_codec({}) is Codec.LZ4
    assert chosen_codec({"EYAS_STORE_CODEC": "none"}) is Codec.NONE
    with pytest.raises(UsageError) as caught:
        chosen_codec({"EYAS_STORE_CODEC": "lz5"})
    assert caught.value.hint == "did you mean `lz4`?"
