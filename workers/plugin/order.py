"""What one request asks of the plugin, and how far it is. No SGLang, no torch.

A request asks with `return_hidden_states: true` and `custom_params: {"eyas": {"states": "spool",
"name": …, "hs_indices": […]}}`. What cannot be done is not an error of the server: the request
runs and its reply says why it has no states.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from storage.errors import EyasError, UsageError
from storage.files import checked_name
from storage.sample import SpoolRef
from workers.plugin.draft import Draft
from workers.plugin.facts import NORM, ModelFacts
from workers.plugin.of_sglang import ATTRIBUTE, Request
from workers.plugin.rows import Part

MOST_LAYERS = 100_000
"""No model has so many: a number of a million digits cannot even be written down."""


@dataclass(slots=True, kw_only=True, eq=False)
class Order:
    """One request's states."""

    name: str
    """File name in the spool."""
    hs_indices: tuple[int, ...]
    """What is wanted, ascending."""
    columns: tuple[int, ...]
    """Their places among what the model gives."""
    draft: Draft | None = None
    """Its file; None before its first rows."""
    arriving: Part | None = None
    """Its rows of the batch that is being processed."""
    failed: EyasError | None = None
    """Why it will have no states."""
    writing: "Future[SpoolRef] | None" = None
    aborted: bool = False
    """Its client left while it was being written."""
    outcome: dict[str, Any] | None = None
    """What the reply says; None until that is known."""

    def fail(self, error: EyasError) -> None:
        """Give up on its states; the first reason stays."""
        # Its traceback would keep every array of the frames it went through.
        error.__traceback__ = error.__context__ = None
        self.failed = self.failed or error
        self.arriving = None
        if self.draft is not None:
            self.draft.abort()


def order_of(request: Request) -> Order | None:
    """The order that `placed` found on the request, if any."""
    found = vars(request).get(ATTRIBUTE)
    return found if isinstance(found, Order) else None


def placed(request: Request, facts: ModelFacts) -> Order | None:
    """The request's order, read the first time it is seen; None when it asks nothing of the plugin."""
    own = vars(request)
    if ATTRIBUTE not in own:
        own[ATTRIBUTE] = read_order(request, facts)
    return order_of(request)


def read_order(request: Request, facts: ModelFacts) -> Order | None:
    """What the request asks for; None when it is not for the plugin."""
    custom = request.sampling_params.custom_params
    asked = custom.get("eyas") if isinstance(custom, dict) else None
    if request.return_hidden_states is not True or not isinstance(asked, dict):
        return None
    try:
        return _read(request, asked, facts)
    except EyasError as error:
        return Order(name="", hs_indices=(), columns=(), failed=error)


def _read(request: Request, asked: dict[str, Any], facts: ModelFacts) -> Order:
    # Only a text is repeated: writing down what is nested deep enough would be an error itself.
    states = asked.get("states")
    if states != "spool":
        said = states[:40] if isinstance(states, str) else type(states).__name__
        raise _wrong(f"states `{said}`: there is only `spool`")
    name = asked.get("name")
    if not isinstance(name, str):
        raise _wrong("the name is no text")
    checked_name(name, "spool file")
    wanted = asked.get("hs_indices") or facts.given
    if not isinstance(wanted, list | tuple) or not all(
        isinstance(index, int) and abs(index) < MOST_LAYERS for index in wanted
    ):
        raise _wrong("hs_indices is no list of numbers")
    hs_indices = tuple(sorted(set(wanted)))
    if not set(hs_indices) <= set(facts.given):
        raise _wrong(f"hs_indices {list(hs_indices)}: this server gives {list(facts.given)}")
    if request.stream:
        raise _wrong("states cannot be had from a stream: ask with `stream: false`")
    if request.sampling_params.n != 1:
        raise _wrong(f"n = {request.sampling_params.n}: one file has one response's states")
    return Order(name=name, hs_indices=hs_indices, columns=tuple(facts.given.index(i) for i in hs_indices))


def announced(order: Order, ref: SpoolRef, facts: ModelFacts) -> dict[str, Any]:
    """What the reply says of states that are in the spool."""
    return {
        "node": ref.node,
        "name": ref.name,
        "shape": list(ref.shape),
        "crc32": ref.crc32,
        "hs_indices": list(order.hs_indices),
        "norm": NORM if facts.num_layers in order.hs_indices else "none",
        "kv_dtype": facts.kv_dtype,
    }


def refused(error: EyasError) -> dict[str, Any]:
    """What the reply says of states that are not."""
    return {"error": error.code, "message": error.message}


def _wrong(message: str) -> UsageError:
    return UsageError(message, code="states.request")
