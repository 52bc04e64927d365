"""One `/generate` request from its body to its reply: limits, slot, computing, states, pace, abort.

Runs on the event loop; writing states, to the spool or as JSON, happens in threads beside it.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from storage.errors import FullError, UnavailableError
from storage.sample import SpoolRef
from storage.spool import Spool
from workers.engine.backends import Backend
from workers.engine.bf16 import Bits
from workers.engine.detokenize import Detokenizer
from workers.engine.order import Completion, Order
from workers.engine.pacing import Slots, due, wait_until
from workers.engine.refusal import by_state, by_value
from workers.engine.reply import Clock, encode, logprobs_json, meta_info, states_json
from workers.engine.request import Request, read_request
from workers.engine.settings import RESERVED_TOKENS, Settings
from workers.engine.stopping import stop_at

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Flight:
    """A request that is not answered yet."""

    order: Order
    running: bool = False
    """Whether it holds a slot."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def abort(self) -> None:
        """Answer it now, with what there is."""
        self.aborted.set()
        self.order.aborted = True


class Generation:
    """Answers `/generate`."""

    def __init__(
        self, settings: Settings, backend: Backend, detokenizer: Detokenizer, spool: Spool | None
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._config = backend.config
        self._detokenizer = detokenizer
        self._spool = spool
        self._slots = Slots(settings.slots, settings.max_queued)
        self._flights: dict[str, Flight] = {}
        self._writers = ThreadPoolExecutor(2, thread_name_prefix="states")

    @property
    def in_flight(self) -> int:
        """Requests not answered yet."""
        return len(self._flights)

    @property
    def running(self) -> list[int]:
        """Prompt tokens of each request that holds a slot."""
        return [len(flight.order.tokens) for flight in self._flights.values() if flight.running]

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return sum(not flight.running for flight in self._flights.values())

    def abort(self, prefix: str, *, everything: bool = False) -> None:
        """End every request whose id begins with `prefix`, as the real server does."""
        for rid, flight in self._flights.items():
            if everything or (prefix and rid.startswith(prefix)):
                flight.abort()

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """The reply to one request; a client that leaves cancels this, which aborts the order."""
        received = time.monotonic()
        request = read_request(await http.read())
        order = self._order(request)
        if request.rid in self._flights:
            raise by_value(f"Duplicate request ID detected: {request.rid}")
        flight = self._flights[request.rid] = Flight(order)
        try:
            async with self._slots.one():
                flight.running = True
                started = time.monotonic()
                completion = await self._backend.complete(order)
                clock = Clock(
                    received=received,
                    started=started,
                    first_token=max(completion.first_token, self._due(started, 1)),
                )
                if request.stream:
                    return await self._stream(http, request, flight, completion, clock)
                return web.Response(
                    body=await self._reply(request, flight, completion, clock),
                    content_type="application/json",
                )
        finally:
            del self._flights[request.rid]

    async def _reply(self, request: Request, flight: Flight, completion: Completion, clock: Clock) -> bytes:
        """The body, not before its paced time; states are written while that passes."""
        ref, rows = None, "[]" if request.states else None
        if completion.states is not None and not completion.aborted:
            if request.spool is not None and self._spool is not None:
                ref, rows = await self._spooled(self._spool, request.spool.name, completion.states), None
            else:
                prompt = len(flight.order.tokens)
                rows = await self._in_thread(states_json, completion.states, prompt)
        try:
            await wait_until(self._due(clock.started, len(completion.output_ids)), flight.aborted)
            if flight.aborted.is_set():
                self._cut(completion, clock.started)
        except BaseException:
            self._forget(ref)
            raise
        reply = self._content(request, flight.order, completion, clock)
        if completion.aborted:  # nobody uses a part, so an aborted request leaves no file either
            self._forget(ref)
        elif ref is not None:
            reply["meta_info"]["eyas_states"] = self._announced(ref, flight.order)
        return encode(reply, "[]" if rows is not None and completion.aborted else rows)

    async def _stream(
        self, http: web.Request, request: Request, flight: Flight, completion: Completion, clock: Clock
    ) -> web.StreamResponse:
        """Server-sent events, one a token, each with all tokens so far; hidden states are not streamed."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        for count in range(1, len(completion.output_ids) + 1):
            await wait_until(self._due(clock.started, count), flight.aborted)
            last = count == len(completion.output_ids)
            shown = completion if last else Completion(output_ids=completion.output_ids[:count])
            reply = self._content(request, flight.order, shown, clock)
            if not last:
                reply["meta_info"]["finish_reason"] = None
            await response.write(b"data: " + encode(reply) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _order(self, request: Request) -> Order:
        """What to compute, within the limits; raises `Refusal` in the order the real server does."""
        settings, sampling = self._settings, request.sampling
        tokens = request.tokens
        if tokens is None:
            tokens = np.array(self._detokenizer.ids(request.text or ""), dtype=np.int64)
        count, context = len(tokens), settings.context_length
        if count >= context:
            raise by_value(
                f"The input ({count} tokens) is longer than the model's context length ({context} tokens)."
            )
        if sampling.max_new_tokens is not None and count + sampling.max_new_tokens > context:
            raise by_value(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. "
                f"You requested a total of {count + sampling.max_new_tokens} tokens: {count} tokens from the "
                f"input messages and {sampling.max_new_tokens} tokens for the completion. Please reduce the "
                "number of tokens in the input messages or the completion to fit within the limit."
            )
        if request.states and settings.states == "off":
            raise by_value(
                "The server is not configured to return hidden states. Please set "
                "`--return-hidden-states-mode last`, `--return-hidden-states-mode full`, or the legacy "
                "`--enable-return-hidden-states` flag."
            )
        if request.states and request.stream:
            raise by_value("the embedded engine does not stream hidden states")
        if request.logprobs_from is not None and request.stream:
            raise by_value("the embedded engine does not stream log-probabilities")
        if count >= context - RESERVED_TOKENS:
            raise by_value(
                f"Input length ({count} tokens) exceeds the maximum allowed length "
                f"({context - RESERVED_TOKENS} tokens). Use a shorter input or enable --allow-auto-truncate."
            )
        if not count or tokens.min() < 0 or tokens.max() >= self._config.vocab_size:
            raise by_value(f"input_ids must be from 0 to {self._config.vocab_size - 1}")  # a real server dies
        limit = context - 2 - count
        ends = settings.mean_tokens > 0 and not sampling.ignore_eos and bool(self._config.eos_ids)
        return Order(
            tokens=tokens,
            sampling=sampling,
            max_new_tokens=limit if sampling.max_new_tokens is None else min(limit, sampling.max_new_tokens),
            layers=self._layers(request),
            logprobs_from=self._logprobs_from(request, count),
            stop_at=stop_at(tokens, settings.mean_tokens) if ends else None,
        )

    def _logprobs_from(self, request: Request, count: int) -> int | None:
        start = request.logprobs_from
        if start is None or start == -1:
            return None if start is None else count
        if not 0 <= start <= count:
            raise by_value(
                f"req.logprob_start_len={start} is higher than the number of input tokens "
                f"len(req.origin_input_ids)={count}. Please use a smaller logprob_start_len."
            )
        return start

    def _layers(self, request: Request) -> tuple[int, ...]:
        layers = self._config.num_layers
        if not request.states:
            return ()
        if request.spool is None or self._spool is None:
            return self._config.aux_layers if self._settings.aux else (layers,)
        wanted = request.spool.hs_indices or (*self._config.aux_layers, layers)
        if not all(0 <= index <= layers for index in wanted):
            raise by_value(f"hs_indices {list(wanted)} are not from 0 to {layers}")
        return wanted

    async def _spooled(self, spool: Spool, name: str, states: Bits) -> SpoolRef:
        """The states in the spool; a client that leaves meanwhile leaves no file.

        Raises `Refusal` with 507 when the spool is full: a lane waits for room and counts no attempt.
        """
        writing = asyncio.ensure_future(self._in_thread(spool.write, name, states))
        try:
            ref: SpoolRef = await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(lambda done: self._forget(None if done.exception() else done.result()))
            raise
        except (FullError, UnavailableError) as error:
            raise by_state(error.message, 507) from None
        return ref

    def _forget(self, ref: SpoolRef | None) -> None:
        if ref is not None and self._spool is not None:
            self._spool.delete(ref)

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._writers, function, *arguments)

    def _announced(self, ref: SpoolRef, order: Order) -> dict[str, Any]:
        return {
            "node": ref.node,
            "name": ref.name,
            "shape": list(ref.shape),
            "crc32": ref.crc32,
            "hs_indices": list(order.layers),
            "norm": "post" if self._config.num_layers in order.layers else "none",
            "kv_dtype": "bfloat16",
        }

    def _content(
        self, request: Request, order: Order, completion: Completion, clock: Clock
    ) -> dict[str, Any]:
        sampling, ids = request.sampling, completion.output_ids
        shown = ids[:-1] if completion.matched is not None and not sampling.no_stop_trim else ids
        weights = self._settings.weight_version
        meta = meta_info(request.rid, len(order.tokens), completion, clock, weights)
        if order.logprobs_from is not None:
            meta |= logprobs_json(order, completion)
        return {
            "text": self._detokenizer.text(shown, skip_special=sampling.skip_special_tokens),
            "output_ids": ids,
            "meta_info": meta,
        }

    def _due(self, started: float, tokens: int) -> float:
        return due(started, tokens, self._settings.pace_ttft_s, self._settings.pace_tpot_s)

    def _cut(self, completion: Completion, started: float) -> None:
        """Leave what the paced server would have made by now."""
        now, count = time.monotonic(), len(completion.output_ids)
        while count and self._due(started, count) > now:
            count -= 1
        if count < len(completion.output_ids):
            completion.output_ids = completion.output_ids[:count]
            completion.matched = None
            completion.aborted = True
