"""Copies a batch's rows to the host, at once: the next batch may write where they are.

Under CUDA graphs and breakable prefill graphs the tensors of a batch are views of buffers that the
next one reuses; copies taken when the batch is processed would be finite, complete and another
batch's. So the copy is queued right behind the forward pass, on its stream, into memory of its own.
This is the only file that knows torch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from storage.errors import UnsuitableError
from workers.plugin.facts import ModelFacts
from workers.plugin.launch import Launch, Place
from workers.plugin.of_sglang import LogitsOutput
from workers.plugin.rows import Bits, Part


@dataclass(slots=True, kw_only=True, eq=False)
class Taken:
    """A launched batch's rows on their way to the host."""

    copies: list[tuple[torch.Tensor | None, torch.Tensor]]
    """Auxiliary layers and final state for each place, bfloat16, host memory of its own."""
    ready: Any
    """An event of the device; None when the copies are there already."""

    def part(self, number: int, place: Place) -> Part:
        """The rows of a place, once they have arrived."""
        if self.ready is not None:
            self.ready.synchronize()
            self.ready = None
        aux, final = self.copies[number]
        return Part(
            start=place.position,
            count=place.count,
            aux=None if aux is None else _bits(aux),
            final=_bits(final),
        )


def take(launch: Launch, output: LogitsOutput, facts: ModelFacts) -> Taken:
    """Queue the copies of every wanted row behind the batch that has just been launched.

    Raises `UnsuitableError` when the tensors are not what the model was said to give.
    """
    aux, final = (output.hidden_states if facts.aux else None), output.last_hidden_states
    _check(launch, output, aux, final, facts)
    if all(place.count == 1 for place in launch.places):  # decoding: one copy, then views of it
        rows = [place.row for place in launch.places]
        dense = rows == list(range(rows[0], rows[0] + len(rows)))
        pick: Any = slice(rows[0], rows[-1] + 1) if dense else rows
        whole_aux = None if aux is None else _to_host(aux[pick])
        whole = _to_host(final[pick])
        copies = [
            (None if whole_aux is None else whole_aux[i : i + 1], whole[i : i + 1]) for i in range(len(rows))
        ]
    else:
        copies = []
        for place in launch.places:
            rows_of = slice(place.row, place.row + place.count)
            copies.append((None if aux is None else _to_host(aux[rows_of]), _to_host(final[rows_of])))
    return Taken(copies=copies, ready=_event(final.device))


def _check(launch: Launch, output: LogitsOutput, aux: Any, final: Any, facts: ModelFacts) -> None:
    found = [None if tensor is None else tuple(tensor.shape) for tensor in (aux, final)]
    whole = final is not None and (aux is not None or not facts.aux)
    if (
        not whole
        or getattr(output, "hidden_states_token_indices", None) is not None
        or final.shape[0] < launch.total
        or final.shape[1] != facts.hidden_size
        or (aux is not None and aux.shape[0] < launch.total)
        or (aux is not None and aux.shape[1] != facts.hidden_size * len(facts.aux))
    ):
        raise UnsuitableError(
            f"a batch of {launch.total} rows gave {found} for {len(facts.aux)} auxiliary layers and the "
            f"final state of size {facts.hidden_size}",
            code="states.layers",
        )


def _to_host(rows: torch.Tensor) -> torch.Tensor:
    """The rows as bfloat16 in host memory of their own; on a device, only queued.

    Converted on the device: that halves what crosses for float32.
    """
    if rows.device.type == "cpu":
        return rows.to(torch.bfloat16, copy=True)
    rows = rows.to(torch.bfloat16).contiguous()
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    # The allocator must not give the rows to another stream before the copy has run.
    rows.record_stream(torch.get_device_module(rows.device).current_stream())
    return host


def _event(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def _bits(rows: torch.Tensor) -> Bits:
    bits: Bits = rows.view(torch.int16).numpy().view(np.uint16)
    return bits
