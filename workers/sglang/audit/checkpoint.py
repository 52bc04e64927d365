"""Single tensors of a checkpoint on this machine, read in slices and never as a whole.

The safetensors library gives NumPy no bfloat16, so its header is read here: u64 length, JSON, raw
little-endian data (https://github.com/huggingface/safetensors). What the tensors mean is in
`output_head.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 100_000_000
"""Longest header that the library accepts too."""
FLOATS: Mapping[str, str] = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
INDEX = "model.safetensors.index.json"


class CheckpointError(Exception):
    """Why a checkpoint cannot be used: a few words, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Where a tensor lies."""

    path: Path
    dtype: str
    """A key of `FLOATS`."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Its rows `[start, stop)` along the first axis, as float32.

        Raises `OSError` when the file is gone and `ValueError` when it has become shorter.
        """
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        dtype = np.dtype(FLOATS[self.dtype])
        with self.path.open("rb") as file:
            file.seek(self.start + start * width * dtype.itemsize)
            values = np.fromfile(file, dtype, (stop - start) * width)
        values = values.reshape(stop - start, *self.shape[1:])
        return as_floats(values) if self.dtype == "BF16" else values.astype(np.float32)


def as_floats(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 numbers behind bf16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def find_tensor(folder: Path, names: Sequence[str]) -> Tensor | None:
    """The first of these names that the folder's safetensors files have; None when they have none.

    Raises `CheckpointError` for a folder without such files, for one that cannot be read, and for
    a tensor whose numbers are not plain floats, as those of a quantized one.
    """
    try:
        for name, path in _places(folder, names):
            found = _tensor(path, name)
            if found is not None:
                return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"its files cannot be read: {error!r}"[:200]) from None
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`, of a model with several parts that of its text part. Raises `CheckpointError`."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        inner = config.get("text_config") or config.get("llm_config")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its `config.json` cannot be read: {error!r}"[:200]) from None
    return inner if isinstance(inner, dict) else config


def _places(folder: Path, names: Sequence[str]) -> list[tuple[str, Path]]:
    """Names and the files that may hold them, in the order of the names."""
    index = folder / INDEX
    if index.exists():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        # a file of the folder itself, whatever the index says
        return [(name, folder / Path(weight_map[name]).name) for name in names if name in weight_map]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError("it has no `*.safetensors`")
    return [(name, file) for name in names for file in files]


def _tensor(path: Path, name: str) -> Tensor | None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_BYTES:
            raise ValueError(f"`{path.name}` is not a safetensors file")
        entry = json.loads(file.read(length)).get(name)
    if entry is None:
        return None
    shape, dtype = tuple(int(size) for size in entry["shape"]), str(entry["dtype"])
    if dtype not in FLOATS:
        raise CheckpointError(f"`{name}` is `{dtype[:20]}`, not bf16, f16 or f32")
    start, end = (int(at) for at in entry["data_offsets"])
    if min(shape, default=0) < 1 or end - start != int(np.prod(shape)) * np.dtype(FLOATS[dtype]).itemsize:
        raise ValueError(f"`{name}` has a wrong size")
    return Tensor(path=path, dtype=dtype, shape=shape, start=8 + length + start)
