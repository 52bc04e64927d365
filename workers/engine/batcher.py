"""Continuous batching in one thread: prefill what arrives, decode all that runs, hand back what ends.

The one thread owns the model and the cache; other threads only `submit` and set `order.aborted`.
Nothing here knows HTTP.
"""

import os
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from workers.engine.bf16 import Bits, Floats, from_bits
from workers.engine.kvcache import Pools
from workers.engine.llama import Llama, Prefilled
from workers.engine.order import Completion, Order
from workers.engine.sampler import logprobs, pick
from workers.engine.stopping import stop_ids

PREFILL_S = 0.05
"""Prompts are read for so long between two steps of decoding."""
LOGPROB_ROWS = 64
"""Rows whose logits are held at once for log-probabilities."""

Done = Callable[[Order, Completion], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Reading:
    """A sequence whose prompt is being read."""

    order: Order
    left: int
    """Tokens still to read."""
    chunks: Generator[int, None, Prefilled]
    started: float = field(default_factory=time.monotonic)


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A running sequence."""

    order: Order
    completion: Completion
    seed: int
    stops: frozenset[int]
    """Tokens that end it when picked."""
    rows: list[Bits] = field(default_factory=list)
    """Captured states, each [t, L, H]."""


class Batcher:
    """Runs orders until told to stop."""

    def __init__(self, model: Llama, *, slots: int, masked_ids: Iterable[int], done: Done) -> None:
        """`done` is called in the thread; `masked_ids` are not picked where the prompt decides the length."""
        self._model = model
        self._slots = slots
        self._masked = np.array(sorted(masked_ids), dtype=np.int64)
        self._done = done
        self._pools: Pools[Running] = Pools(model.config)
        self._running = 0
        self._reading: list[Reading] = []
        self._oldest = False
        self._waiting: deque[Order] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, order: Order) -> None:
        """Compute this; `done` follows, also for an aborted one."""
        with self._wake:
            self._waiting.append(order)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after its current step; what runs is dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except (
            Exception
        ):  # the outermost edge of the thread: an engine that cannot compute must not look alive
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._reading or self._running or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return
            self._admit()
            self._read()
            if self._running:
                self._drop_aborted()
                self._step()

    def _admit(self) -> None:
        with self._wake:
            while self._waiting and self._running + len(self._reading) < self._slots:
                order = self._waiting.popleft()
                chunks = self._model.prefilling(order.tokens, self._captured(order))
                self._reading.append(Reading(order=order, left=len(order.tokens), chunks=chunks))

    def _read(self) -> None:
        """Prefill, by turns the oldest prompt and the shortest: a long one neither blocks nor starves."""
        until = time.monotonic() + PREFILL_S
        while self._reading and time.monotonic() < until:
            self._oldest = not self._oldest
            reading = self._reading[0] if self._oldest else min(self._reading, key=lambda one: one.left)
            if reading.order.aborted:
                self._reading.remove(reading)
                self._done(reading.order, Completion(aborted=True))
                continue
            try:
                reading.left = next(reading.chunks)
            except StopIteration as read:
                self._reading.remove(reading)
                self._begin(reading, read.value)

    def _begin(self, reading: Reading, prefilled: Prefilled) -> None:
        order, (last, keys, values, states) = reading.order, prefilled
        final = None
        if order.logprobs_from is not None and states is not None:
            states, final = states[:, :-1], states[:, -1]
        sequence = Running(
            order=order,
            completion=Completion(started=reading.started),
            seed=secrets.randbits(63) if order.sampling.seed is None else order.sampling.seed,
            stops=stop_ids(
                self._model.config.eos_ids, order.sampling.stop_token_ids, order.sampling.ignore_eos
            ),
        )
        if final is not None:
            sequence.completion.prompt_logprobs = self._read_logprobs(order, final)
        if order.max_new_tokens > 0:
            if states is not None and order.layers:
                sequence.rows.append(states)
            (token,) = self._choose(last[None], [sequence])
            self._accept(sequence, token)
        sequence.completion.first_token = time.monotonic()
        if self._is_over(sequence):
            self._finish(sequence)
        else:
            self._pools.add(sequence, keys, values)
            self._running += 1

    def _captured(self, order: Order) -> tuple[int, ...]:
        """Indices of the states to keep of a prompt: with log-probabilities also the final one, last."""
        more = () if order.logprobs_from is None else (self._model.config.num_layers,)
        return order.layers + more

    def _read_logprobs(self, order: Order, final: Bits) -> list[float]:
        """Of the prompt's tokens behind the first that was named, from final states [T, H]."""
        assert order.logprobs_from is not None
        found: list[float] = []
        for start in range(order.logprobs_from, len(order.tokens) - 1, LOGPROB_ROWS):
            stop = min(len(order.tokens) - 1, start + LOGPROB_ROWS)
            logits = self._model.logits(from_bits(final[start:stop]).astype(np.float64))
            found += logprobs(logits, order.tokens[start + 1 : stop + 1]).tolist()
        return found

    def _step(self) -> None:
        pools = self._pools.in_use()
        sequences = [sequence for pool in pools for sequence in pool.owners]
        if not sequences:
            return
        layers = tuple(sorted({layer for sequence in sequences for layer in sequence.order.layers}))
        tokens = np.array([sequence.completion.output_ids[-1] for sequence in sequences])
        final, states = self._model.decode(tokens, pools, layers)
        for row, sequence in enumerate(sequences):
            if states is not None and sequence.order.layers:
                columns = [layers.index(layer) for layer in sequence.order.layers]
                sequence.rows.append(states[row : row + 1, columns])
        for sequence, token in zip(sequences, self._choose(final, sequences), strict=True):
            self._accept(sequence, token)
            if self._is_over(sequence):
                self._retire(sequence)

    def _choose(self, final: Floats, sequences: Sequence[Running]) -> list[int]:
        logits = self._model.logits(final)
        said = logits.copy() if any(one.order.logprobs_from is not None for one in sequences) else None
        decided = [row for row, sequence in enumerate(sequences) if sequence.order.stop_at is not None]
        if decided and len(self._masked):
            logits[np.array(decided)[:, None], self._masked] = -np.inf
        counts = [len(sequence.completion.output_ids) for sequence in sequences]
        for row, sequence in enumerate(sequences):
            if counts[row] < sequence.order.sampling.min_new_tokens and sequence.stops:
                logits[row, list(sequence.stops)] = -np.inf
        seeds = [sequence.seed for sequence in sequences]
        samplings = [sequence.order.sampling for sequence in sequences]
        chosen: list[int] = pick(logits, samplings, seeds, counts).tolist()
        for row in decided:
            order = sequences[row].order
            assert order.stop_at is not None
            if counts[row] + 1 >= max(order.stop_at, order.sampling.min_new_tokens + 1):
                chosen[row] = self._model.config.eos_ids[0]
        if said is not None:
            self._say_logprobs(said, sequences, chosen)
        return chosen

    def _say_logprobs(self, logits: Floats, sequences: Sequence[Running], chosen: Sequence[int]) -> None:
        for row, sequence in enumerate(sequences):
            if sequence.order.logprobs_from is not None:
                sampling = sequence.order.sampling
                scaled = logits[row : row + 1] / (1.0 if sampling.greedy else sampling.temperature)
                sequence.completion.output_logprobs += logprobs(scaled, np.array([chosen[row]])).tolist()

    def _accept(self, sequence: Running, token: int) -> None:
        completion = sequence.completion
        completion.output_ids.append(token)
        if token in sequence.stops:
            completion.matched = token

    def _is_over(self, sequence: Running) -> bool:
        completion = sequence.completion
        return completion.matched is not None or len(completion.output_ids) >= sequence.order.max_new_tokens

    def _drop_aborted(self) -> None:
        pools = self._pools.in_use()
        for sequence in [owner for pool in pools for owner in pool.owners if owner.order.aborted]:
            sequence.completion.aborted = True
            self._retire(sequence)

    def _retire(self, sequence: Running) -> None:
        self._pools.remove(sequence)
        self._running -= 1
        self._finish(sequence)

    def _finish(self, sequence: Running) -> None:
        completion = sequence.completion
        completion.finished = time.monotonic()
        if sequence.rows:
            completion.states = np.concatenate(sequence.rows) if len(sequence.rows) > 1 else sequence.rows[0]
        self._done(sequence.order, completion)
