"""However many requests are in flight, and however slow the spool: rows in host memory have a bound.

Memory is counted by `tracemalloc`, which NumPy tells of every array, not by the code under test.
"""

import threading
import tracemalloc

import pytest
from scheduling import Batch, Request, expected
from test_capture import Scheduler, prefill

from workers.plugin import draft, facts
from workers.plugin.order import order_of
from workers.plugin.writing import THREADS

MB = 1 << 20
WIDE = facts.ModelFacts(aux=(2, 4, 5), hidden_size=1024, num_layers=8, vocab_size=100, kv_dtype="bfloat16")
ROW_BYTES = 4 * 1024 * 2
REQUESTS, PROMPT, NEW = 48, 32, 200
BATCH_BYTES = REQUESTS * ROW_BYTES
"""Rows of a step, copied for all requests before each has its own."""
OTHERS_BYTES = 4 * MB
"""Python's own objects."""


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setattr("scheduling.FACTS", WIDE)
    monkeypatch.setattr("test_capture.FACTS", WIDE)
    monkeypatch.setattr(draft, "GATHERED_BYTES", 8 * ROW_BYTES)
    monkeypatch.setattr(draft, "BLOCK_BYTES", MB)


def traced(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def step(scheduler, requests):
    """One token for each."""
    at = [len(r.origin_input_ids) + len(r.output_ids_through_stop) - 1 for r in requests]
    scheduler.run(Batch(requests, at, [1] * len(at), decode=True))
    for request in requests:
        request.output_ids_through_stop.append(7)


def test_many_long_requests_are_held_in_what_they_gather_and_no_more(wide, tmp_path):
    scheduler = Scheduler(tmp_path / "spool", max_bytes=1 << 30)
    requests = [Request(f"r{i}", PROMPT, name=f"f{i}") for i in range(REQUESTS)]
    idle = threading.Event()

    def run():
        for request in requests:
            prefill(scheduler, request, [PROMPT])
        for _ in range(NEW):
            step(scheduler, requests)
            while scheduler.writer.budget.held_bytes > REQUESTS * draft.GATHERED_BYTES:
                idle.wait(0.001)  # a forward pass, in which the writers have time
        for request in requests:
            request.finish()
            scheduler.capture.may_go(request, order_of(request))

    peak = traced(run)
    # What waits, what one step adds to it, a block for each thread, a step's copy and the tensors it is of.
    bound = 2 * REQUESTS * draft.GATHERED_BYTES + THREADS * draft.BLOCK_BYTES + 2 * BATCH_BYTES + OTHERS_BYTES
    assert peak < bound < REQUESTS * (PROMPT + NEW) * ROW_BYTES / 5
    scheduler.wait(*requests)
    for request in requests[::7]:
        assert (scheduler.stored(request.said) == expected(request, 0, PROMPT + NEW)).all()
    scheduler.writer.close()


def test_a_spool_that_takes_nothing_fails_requests_and_holds_the_limit(wide, tmp_path):
    limit = 24 * MB
    scheduler = Scheduler(tmp_path / "spool", max_bytes=1 << 30, waiting_bytes=limit)
    requests = [Request(f"r{i}", PROMPT, name=f"f{i}") for i in range(REQUESTS)]

    def run():
        for request in requests:
            prefill(scheduler, request, [PROMPT])
        for _ in range(NEW):
            step(scheduler, requests)

    with scheduler.busy_writers():
        peak = traced(run)
        assert peak < limit + 2 * BATCH_BYTES + PROMPT * ROW_BYTES + OTHERS_BYTES
        said = []
        for request in requests:
            request.finish()
            if scheduler.capture.may_go(request, order_of(request)):
                said.append(request.said["error"])
    assert said
    assert set(said) == {"spool.full"}
    whole = [request for request in requests if order_of(request).failed is None]
    scheduler.wait(*whole)
    for request in whole:
        assert (scheduler.stored(request.said) == expected(request, 0, PROMPT + NEW)).all()
    assert scheduler.files() == sorted(order_of(request).name for request in whole)
    assert scheduler.writer.budget.held_bytes == 0
