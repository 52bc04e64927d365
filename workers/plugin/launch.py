"""Which rows of a batch are whose, read when it is launched: later the batch may be another.

Positions are absolute: the first token of a prompt is 0. Nothing is copied here.
"""

from dataclasses import dataclass
from typing import Any

from workers.plugin.facts import ModelFacts
from workers.plugin.of_sglang import Batch
from workers.plugin.order import Order, placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Rows of one request in a batch."""

    order: Order
    row: int
    """Its first row in the batch's tensors."""
    position: int
    """Which token of the request that is."""
    count: int
    """Rows, of consecutive positions."""


@dataclass(slots=True, kw_only=True, eq=False)
class Launch:
    """One batch's rows that are wanted, from its launch to its processing."""

    places: list[Place]
    total: int
    """Rows the batch has."""
    taken: Any = None
    """The copies that were made of them (`host_copy.Taken`)."""


def read_launch(batch: Batch, facts: ModelFacts) -> Launch | None:
    """What this batch has for the plugin; None when none of its requests asks."""
    orders = [placed(request, facts) if request.return_hidden_states else None for request in batch.reqs]
    if not any(orders):
        return None
    if batch.forward_mode.is_decode():
        counts = [1] * len(orders)
        positions = [int(length) - 1 for length in batch.seq_lens_cpu.tolist()[: len(orders)]]
    elif batch.forward_mode.is_extend():
        counts = [int(length) for length in batch.extend_lens]
        positions = [int(length) for length in batch.prefix_lens]
    else:
        return None
    places, row = [], 0
    for order, position, count in zip(orders, positions, counts, strict=True):
        if order is not None and order.failed is None and count:
            places.append(Place(order=order, row=row, position=position, count=count))
        row += count
    return Launch(places=places, total=row) if places else None
