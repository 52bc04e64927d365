"""What a store's folder holds, read with zarr alone: none of the code that wrote it decides what is there."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import zarr


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One row of a segment of responses."""

    id: bytes
    digest: bytes
    tokens: np.ndarray
    """Prompt and response, int32 [T]."""
    prompt_length: int
    segment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One row of a segment of states."""

    id: bytes
    digest: bytes
    segment: Path
    first: int
    """Where its rows begin and end in the segment's array."""
    past: int

    def read(self) -> np.ndarray:
        """uint16 [T, L, H]."""
        return np.asarray(zarr.open_array(self.segment / "states", mode="r")[self.first : self.past])


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """All visible rows, by prompt id."""

    prompts: dict[str, list[bytes]]
    """Dataset → ids, in the order of its rows."""
    prompt_tokens: dict[bytes, np.ndarray]
    answers: dict[bytes, list[Answer]] = field(default_factory=dict)
    tensors: dict[bytes, list[Tensor]] = field(default_factory=dict)
    failures: dict[bytes, list[str]] = field(default_factory=dict)
    """Id → codes."""

    def wanted(self, cap: int) -> list[bytes]:
        """The first prompts of each dataset."""
        return [one for ids in self.prompts.values() for one in ids[:cap]]


def read_books(out: Path, capture: str = "eagle3") -> Books:
    prompts: dict[str, list[bytes]] = {}
    prompt_tokens: dict[bytes, np.ndarray] = {}
    for dataset in sorted(path for path in (out / "prompts").iterdir() if path.is_dir()):
        ids = prompts[dataset.name] = []
        for segment in visible(dataset):
            new, tokens = _ids(segment, "id"), _ragged(segment, "tokens")
            ids += new
            prompt_tokens.update(zip(new, tokens, strict=True))
    books = Books(prompts=prompts, prompt_tokens=prompt_tokens)
    for segment in visible(out / "responses"):
        columns = _ids(segment, "id"), _ids(segment, "digest"), _ragged(segment, "tokens")
        lengths = _array(segment, "prompt_length").tolist()
        for one, digest, tokens, length in zip(*columns, lengths, strict=True):
            answer = Answer(id=one, digest=digest, tokens=tokens, prompt_length=length, segment=segment.name)
            books.answers.setdefault(one, []).append(answer)
    for segment in visible(out / "states" / capture):
        offset = _array(segment, "offset").tolist()
        rows = zip(_ids(segment, "id"), _ids(segment, "digest"), offset[:-1], offset[1:], strict=True)
        for one, digest, first, past in rows:
            tensor = Tensor(id=one, digest=digest, segment=segment, first=first, past=past)
            books.tensors.setdefault(one, []).append(tensor)
    for segment in visible(out / "failures"):
        names = json.loads((segment / "zarr.json").read_text())["attributes"]["codes"]
        for one, code in zip(_ids(segment, "id"), _array(segment, "code").tolist(), strict=True):
            books.failures.setdefault(one, []).append(names[code])
    return books


def digest_of(tokens: np.ndarray) -> bytes:
    """BLAKE2b-16 over the ids as int32 little-endian, as the design says."""
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=16).digest()


def visible(parent: Path) -> Iterator[Path]:
    """Segments that no compaction has replaced, in the order of their names."""
    if not parent.exists():
        return
    found = sorted(path for path in parent.iterdir() if path.name.startswith("s-") and path.is_dir())
    replaced: set[str] = set()
    for path in found:
        attributes = json.loads((path / "zarr.json").read_text())["attributes"]
        replaced.update(attributes.get("replaces", ()))
    yield from (path for path in found if path.name not in replaced)


def _array(segment: Path, name: str) -> np.ndarray:
    return np.asarray(zarr.open_array(segment / name, mode="r")[:])


def _ids(segment: Path, name: str) -> list[bytes]:
    raw = _array(segment, name).tobytes()
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


def _ragged(segment: Path, name: str) -> list[np.ndarray]:
    flat, offset = _array(segment, name), _array(segment, "offset").tolist()
    return [flat[first:past] for first, past in pairwise(offset)]
