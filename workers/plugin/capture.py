"""What one scheduler process does about states: from a batch's launch to a request's reply.

Launch: the rows that are wanted are copied (`host_copy.py`). Processing: those that count go into the
request's file (`draft.py`). Finish: the reply is held back until the file is whole, then says where it is.
Replies are held, not the scheduler. Which functions of SGLang lead here is in `hooks.py`. A failure here
is the request's, never the server's.
"""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from storage.errors import EyasError, UnavailableError
from workers.plugin.draft import Draft
from workers.plugin.facts import ModelFacts
from workers.plugin.launch import Launch, Place, read_launch
from workers.plugin.of_sglang import KEY, Batch, LogitsOutput, Request
from workers.plugin.order import Order, announced, order_of, refused
from workers.plugin.rows import Coverage, Part
from workers.plugin.writing import Writer

logger = logging.getLogger("eyas")


class Taken(Protocol):
    """Copies of a launched batch's rows (`host_copy.Taken`)."""

    def part(self, number: int, place: Place) -> Part:
        """The rows of the launch's place of this number."""


class Take(Protocol):
    """How rows are copied (`host_copy.take`)."""

    def __call__(self, launch: Launch, output: LogitsOutput, facts: ModelFacts) -> Taken:
        """Queue the copies of a batch's wanted rows."""


class Capture:
    """One scheduler process's states."""

    def __init__(self, facts: ModelFacts, writer: Writer, take: Take, *, replies: bool) -> None:
        """`replies` says whether this rank is the one whose output reaches clients."""
        self._facts = facts
        self._writer = writer
        self._take = take
        self._replies = replies
        self._held: list[Request] = []

    @property
    def holding(self) -> bool:
        """Whether a reply waits for its states to be written."""
        return bool(self._held)

    def launch(self, batch: Batch) -> Launch | None:
        """What of this batch is wanted; None on a rank that does not reply."""
        if not batch.return_hidden_states:
            return None
        try:
            launch = read_launch(batch, self._facts)
        except Exception:
            logger.exception("states of a batch are lost")
            return None
        return launch if self._replies else None

    def take(self, launch: Launch, output: LogitsOutput | None) -> None:
        """Copy what is wanted, once; to be called behind the batch's forward pass, on its stream."""
        if launch.taken is None and output is not None:
            with self._failing(*(place.order for place in launch.places)):
                launch.taken = self._take(launch, output, self._facts)

    def arrive(self, launch: Launch) -> None:
        """Hand each request its rows of the batch that is about to be processed."""
        if launch.taken is None:
            return
        for number, place in enumerate(launch.places):
            with self._failing(place.order):
                place.order.arriving = launch.taken.part(number, place)

    def leave(self, launch: Launch) -> None:
        """Drop the rows that the processing did not keep."""
        for place in launch.places:
            place.order.arriving = None

    def keep(self, request: Request, order: Order, *, last_chunk: bool) -> None:
        """Keep the request's arriving rows, if they count.

        SGLang does not store a chunk's rows when it is not the last of its prefill, but neither
        those of requests that are finished, retracted or discarded: only the first are good.
        """
        middle = not last_chunk and request.inflight_middle_chunks > 0
        if not request.finished() and not request.is_retracted and (last_chunk or middle):
            self.keep_rows(request, order)

    def keep_rows(self, request: Request, order: Order) -> None:
        """Keep the request's arriving rows: a chunk that counts, or the row of a decoded token."""
        part, order.arriving = order.arriving, None
        if part is None or order.failed is not None:
            return
        with self._failing(order):
            draft = order.draft
            if draft is None:
                draft = order.draft = self._writer.draft(
                    name=order.name, columns=order.columns, hidden_size=self._facts.hidden_size
                )
                # SGLang drops a request in more ways than one, and tells of an abort only some of them.
                weakref.finalize(request, self._writer.abandoned.append, draft)
            if part.count == 1:  # a row of decoding: a view would hold the whole batch's buffer
                draft.put_row(part.start, None if part.aux is None else part.aux[0], part.final[0])
            else:
                draft.put(part)

    def tidy(self) -> None:
        """Give up what belongs to requests that are gone; to be called now and then."""
        self._writer.tidy()

    def may_go(self, request: Request, order: Order) -> bool:
        """Whether the finished request's reply may go out now; else it is held until its file is there.

        Begins to write the file. A reply that may go says where the states are, or why there are none.
        """
        if not self._replies:
            return True
        if order.outcome is None and order.writing is None:
            self._finish(request, order)
        if self._settled(request, order):
            return True
        if request not in self._held:
            self._held.append(request)
        return False

    def released(self) -> Iterator[Request]:
        """Held requests whose states are written."""
        held, self._held = self._held, []
        for request in held:
            order = order_of(request)
            if order is None or self._settled(request, order):
                yield request
            else:
                self._held.append(request)

    def abort(self, prefix: str, *, everything: bool) -> None:
        """The clients of these requests left: what is held of them leaves no file."""
        for request in self._held:
            order = order_of(request)
            if order is not None and (everything or request.rid.startswith(prefix)):
                order.aborted = True

    def _finish(self, request: Request, order: Order) -> None:
        """Settle what needs no writing; begin to write the rest."""
        reason = request.finished_reason.to_json() if request.finished_reason else {}
        if reason.get("type") == "abort":
            order.fail(UnavailableError("the request was aborted", code="states.aborted"))
        total = len(request.origin_input_ids) + len(request.output_ids_through_stop) - 1
        with self._failing(order):
            if order.failed is None:
                order.writing = self._covered(request, order, total).finish(total)
        if order.failed is not None:
            order.outcome = refused(order.failed)

    def _settled(self, request: Request, order: Order) -> bool:
        """Whether it is known what the reply says; then the request has it."""
        if order.outcome is None:
            if order.writing is None or not order.writing.done():
                return False
            self._written(order)
        request.customized_info = {**(request.customized_info or {}), KEY: [order.outcome]}
        request.return_hidden_states = False  # else the reply also had an empty list of floats
        return True

    def _written(self, order: Order) -> None:
        assert order.writing is not None
        with self._failing(order):
            ref = order.writing.result()
            if order.aborted:
                self._writer.delete(ref)
                raise UnavailableError("the request was aborted", code="states.aborted")
            order.outcome = announced(order, ref, self._facts)
        if order.failed is not None:
            order.outcome = refused(order.failed)

    def _covered(self, request: Request, order: Order, total: int) -> Draft:
        """The order's file; raises `UnavailableError` unless it has all rows."""
        covered = Coverage() if order.draft is None else order.draft.covered
        missing = covered.first_missing(total)
        if order.draft is None or missing is not None:
            raise UnavailableError(
                f"{covered.count(total)} of {total} rows, none for position {missing}: "
                f"{request.cached_tokens} tokens came from the prefix cache (a fresh `extra_key` avoids "
                f"that), {request.retraction_count} retractions",
                code="states.short",
            )
        return order.draft

    @contextmanager
    def _failing(self, *orders: Order) -> Iterator[None]:
        """What goes wrong inside fails these orders and nothing else."""
        try:
            yield
        except EyasError as error:
            failure = error
        except Exception as error:
            logger.exception("states of a request are lost")
            failure = EyasError(f"the plugin failed: {error!r}"[:300], code="plugin.failed")
        else:
            return
        for order in orders:
            order.fail(failure)
