"""Reading and writing safetensors files with bfloat16 tensors, which the NumPy side of the library refuses.

The format is u64 length, JSON header, raw little-endian data (https://github.com/huggingface/safetensors).
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.errors import UnsuitableError
from workers.engine.bf16 import Bits, from_bits

_HEADER_LIMIT = 100_000_000
"""What the library accepts too; a longer header is not a safetensors file."""
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def read_tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the folder's `*.safetensors`, by name, as float32.

    Raises `UnsuitableError` when there is none or one is not readable.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsuitableError(
            f"no `*.safetensors` in `{folder}`",
            code="engine.model",
            hint="give --model the folder of a LlamaForCausalLM checkpoint",
        )
    tensors: dict[str, NDArray[np.float32]] = {}
    for file in files:
        tensors.update(_read_file(file))
    return tensors


def _read_file(path: Path) -> dict[str, NDArray[np.float32]]:
    data = np.memmap(path, dtype=np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(_HEADER_LIMIT, data.size - 8):
        raise UnsuitableError(f"`{path}` is not a safetensors file", code="engine.model")
    header = json.loads(data[8 : 8 + length].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        raw = data[8 + length + start : 8 + length + end]
        if entry["dtype"] == "BF16":
            values = from_bits(np.frombuffer(raw, "<u2"))
        elif entry["dtype"] in _FLOATS:
            values = np.frombuffer(raw, _FLOATS[entry["dtype"]]).astype(np.float32)
        else:
            raise UnsuitableError(
                f"`{name}` in `{path}` is `{entry['dtype']}`, not BF16, F16, F32 or F64",
                code="engine.model",
            )
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, Bits]) -> None:
    """Write bfloat16 tensors, given as their bits; the same tensors give the same bytes everywhere."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, bits in tensors.items():
        end = offset + bits.nbytes
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors.values():
            file.write(bits.astype("<u2").tobytes())
