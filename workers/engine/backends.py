"""The two things that can answer an order, awaitable from the event loop: the model, or a hash of the prompt.

The hash answers at no cost, for benchmarks of the queue: same ids and states for the same order, and
nothing like a language model.
"""

import asyncio
import math
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.engine.batcher import Batcher
from workers.engine.bf16 import Bits
from workers.engine.llama import Llama
from workers.engine.model_config import ModelConfig
from workers.engine.order import Completion, Order


class Backend(Protocol):
    """Answers orders."""

    config: ModelConfig

    async def complete(self, order: Order) -> Completion:
        """The order's completion; cancelling the call aborts the order."""
        ...

    def stop(self) -> None:
        """Answer nothing more."""
        ...


class ModelBackend:
    """The Llama, in a thread of its own."""

    def __init__(self, model: Llama, *, slots: int, masked_ids: Iterable[int]) -> None:
        self.config = model.config
        self._loop = asyncio.get_running_loop()
        self._futures: dict[Order, asyncio.Future[Completion]] = {}
        self._batcher = Batcher(model, slots=slots, masked_ids=masked_ids, done=self._done)

    async def complete(self, order: Order) -> Completion:
        """The order's completion; cancelling the call aborts the order."""
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._futures[order] = future
        self._batcher.submit(order)
        try:
            return await future
        finally:
            self._futures.pop(order, None)
            order.aborted = True  # without effect on one that has ended

    def stop(self) -> None:
        """End the thread."""
        self._batcher.stop()

    def _done(self, order: Order, completion: Completion) -> None:
        self._loop.call_soon_threadsafe(self._deliver, order, completion)

    def _deliver(self, order: Order, completion: Completion) -> None:
        future = self._futures.pop(order, None)
        if future is not None and not future.done():
            future.set_result(completion)


class HashBackend:
    """No model: everything is a hash."""

    def __init__(self, config: ModelConfig, *, masked_ids: Iterable[int]) -> None:
        self.config = config
        masked = np.zeros(config.vocab_size, bool)
        masked[list(masked_ids)] = True
        self._ids = np.flatnonzero(~masked)

    async def complete(self, order: Order) -> Completion:
        """The order's completion, at once."""
        limit = order.max_new_tokens
        end = None if order.stop_at is None else max(order.stop_at, order.sampling.min_new_tokens + 1)
        count = limit if end is None else min(limit, end)
        places = np.arange(len(order.tokens), dtype=np.uint64)
        seed = np.uint64(_mix(order.tokens.astype(np.uint64) + (places << np.uint64(32))).sum())
        draws = _mix(np.arange(count, dtype=np.uint64) + seed)
        completion = Completion(output_ids=self._ids[draws % np.uint64(len(self._ids))].tolist())
        if count == end:
            completion.matched = completion.output_ids[-1] = self.config.eos_ids[0]
        if order.logprobs_from is not None:  # one token is as likely as another
            value = -math.log(len(self._ids))
            completion.prompt_logprobs = [value] * (len(order.tokens) - 1 - order.logprobs_from)
            completion.output_logprobs = [value] * count
        if order.layers and count:
            ran = np.concatenate((order.tokens, completion.output_ids[:-1])).astype(np.int64)
            completion.states = hash_states(ran, order.layers, self.config.hidden_size)
        return completion

    def stop(self) -> None:
        """Nothing runs."""


def hash_states(tokens: NDArray[np.int64], layers: tuple[int, ...], hidden: int) -> Bits:
    """bf16 bits [T, L, H] of numbers between 0.5 and 2 in size, from token, position, layer and place."""
    position = np.arange(len(tokens), dtype=np.uint64) << np.uint64(32)
    row = _mix(tokens.astype(np.uint64) + position)[:, None, None]
    layer = _mix(np.array(layers, np.uint64) + np.uint64(1 << 40))[None, :, None]
    place = _mix(np.arange(hidden, dtype=np.uint64) + np.uint64(1 << 41))[None, None, :]
    drawn = _mix(row ^ layer ^ place)
    bits: Bits = ((drawn & np.uint64(0x80FF)) | np.uint64(0x3F00)).astype(np.uint16)
    return bits


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer over uint64, wrapping."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
