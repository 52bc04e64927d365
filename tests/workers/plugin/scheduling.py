"""A scheduler's objects without SGLang: requests, batches and their tensors, as NumPy arrays.

Row t of a request holds its own number in every layer, so that a shifted row is seen.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from workers.plugin.facts import ModelFacts
from workers.plugin.rows import Part

FACTS = ModelFacts(aux=(2, 4, 5), hidden_size=8, num_layers=8, vocab_size=100, kv_dtype="bfloat16")


class Request:
    """What the plugin reads of SGLang's request."""

    def __init__(self, rid: str, prompt: int, name: str = "file", **given: Any) -> None:
        self.rid = rid
        self.stream = given.pop("stream", False)
        self.return_hidden_states: Any = given.pop("states", True)
        self.return_logprob = False
        eyas = {"states": "spool", "name": name, "hs_indices": [2, 4, 5, 8]} | given.pop("asked", {})
        self.sampling_params = SimpleNamespace(n=given.pop("n", 1), custom_params={"eyas": eyas})
        self.origin_input_ids = [1] * prompt
        self.output_ids_through_stop: list[int] = []
        self.finished_reason: Any = None
        self.is_retracted = False
        self.inflight_middle_chunks = 0
        self.cached_tokens = 0
        self.retraction_count = 0
        self.customized_info: dict[str, Any] | None = None
        self.number = int.from_bytes(rid.encode()[-1:], "big")
        assert not given

    def finished(self) -> bool:
        return self.finished_reason is not None

    def finish(self, kind: str = "length") -> None:
        """It has its last token, or was aborted."""
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": kind})

    @property
    def said(self) -> dict[str, Any]:
        """What its reply says of its states."""
        assert self.customized_info is not None
        return self.customized_info["eyas_states"][0]


@dataclass
class Batch:
    """One batch: requests with the positions each has in it."""

    reqs: list[Request]
    prefix_lens: list[int]
    extend_lens: list[int]
    decode: bool = False
    forward_mode: Any = field(init=False)
    return_hidden_states: bool = field(init=False)
    seq_lens_cpu: Any = field(init=False)

    def __post_init__(self) -> None:
        self.forward_mode = SimpleNamespace(is_decode=lambda: self.decode, is_extend=lambda: not self.decode)
        self.return_hidden_states = any(request.return_hidden_states for request in self.reqs)
        lengths = [a + b for a, b in zip(self.prefix_lens, self.extend_lens, strict=True)]
        self.seq_lens_cpu = np.array(lengths)

    def output(self) -> SimpleNamespace:
        """The tensors of its forward pass, uint16."""
        rows = [
            expected(request, start, start + count)
            for request, start, count in zip(self.reqs, self.prefix_lens, self.extend_lens, strict=True)
        ]
        whole = np.concatenate(rows)
        return SimpleNamespace(
            hidden_states=whole[:, :3].reshape(len(whole), -1), last_hidden_states=whole[:, 3]
        )


def expected(request: Request, start: int, stop: int) -> np.ndarray:
    """Rows uint16 [t, 4, 8] of the request's positions [start, stop)."""
    rows = np.empty((stop - start, 4, FACTS.hidden_size), np.uint16)
    rows[:] = (np.arange(start, stop) + 1000 * (request.number % 16)).reshape(-1, 1, 1)
    rows += np.arange(4, dtype=np.uint16).reshape(1, 4, 1) * 100
    return rows


@dataclass
class Copies:
    """Copies that were made at once."""

    parts: list[Part]

    def part(self, number: int, place: Any) -> Part:
        return self.parts[number]


def take(launch: Any, output: Any, facts: ModelFacts) -> Copies:
    """Copy the wanted rows, as `host_copy.take` does with tensors."""
    parts = []
    for place in launch.places:
        rows = slice(place.row, place.row + place.count)
        parts.append(
            Part(
                start=place.position,
                count=place.count,
                aux=output.hidden_states[rows].copy(),
                final=output.last_hidden_states[rows].copy(),
            )
        )
    return Copies(parts)
