"""From batches to files and replies: chunks, retractions, aborts, a spool that is full or gone."""

import gc
import shutil
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from scheduling import FACTS, Batch, Request, expected, take

from storage.sample import SpoolRef
from storage.spool import Spool
from workers.plugin.capture import Capture
from workers.plugin.order import order_of
from workers.plugin.writing import THREADS, Writer


class Scheduler:
    """Launches, processes and finishes, as SGLang's does around the plugin."""

    def __init__(self, folder, max_bytes=1 << 30, waiting_bytes=1 << 30, *, replies=True):
        self.spool = Spool(folder, "node", max_bytes)
        self.writer = Writer(self.spool, waiting_bytes)
        self.capture = Capture(FACTS, self.writer, take, replies=replies)

    def run(self, batch, *, last=True, spoil=False):
        launch = self.capture.launch(batch)
        output = batch.output()
        if launch is not None:
            self.capture.take(launch, output)
        if spoil:
            output.hidden_states[:] = output.last_hidden_states[:] = 0xFFFF
        self.process(batch, launch, last)

    def process(self, batch, launch, last=True):
        if launch is not None:
            self.capture.arrive(launch)
        for request in batch.reqs:
            order = order_of(request)
            if order is None:
                continue
            if batch.decode:
                self.capture.keep_rows(request, order)
            else:
                self.capture.keep(request, order, last_chunk=last and not request.inflight_middle_chunks)
        if launch is not None:
            self.capture.leave(launch)

    def finish(self, request, kind="length"):
        """The reply's word on states, once it goes out."""
        request.finish(kind)
        if self.capture.may_go(request, order_of(request)):
            return request.said
        return self.wait(request)

    @contextmanager
    def busy_writers(self):
        """Both of the writer's threads have something else to do, so that nothing more is written."""
        release, begun = threading.Event(), threading.Barrier(THREADS + 1)

        def wait():
            begun.wait()
            release.wait()

        for _ in range(THREADS):
            self.writer._threads.submit(wait)
        begun.wait()
        try:
            yield
        finally:
            release.set()

    def wait(self, *requests):
        for request in requests:
            order_of(request).writing.exception(timeout=20)
        released = list(self.capture.released())
        assert set(released) == set(requests)
        return requests[0].said

    def stored(self, said):
        ref = SpoolRef(node=said["node"], name=said["name"], shape=tuple(said["shape"]), crc32=said["crc32"])
        return np.concatenate([block.copy() for block in self.spool.blocks(ref)])

    def files(self):
        """What is in the spool when all that was handed over is done."""
        with self.busy_writers():
            return sorted(path.name for path in self.spool.folder.iterdir())


@pytest.fixture
def scheduler(tmp_path):
    made = Scheduler(tmp_path / "spool")
    yield made
    made.writer.close()


def prefill(scheduler, request, chunks, start=0):
    """The request's prompt in chunks of these sizes."""
    for number, count in enumerate(chunks):
        request.inflight_middle_chunks = int(number < len(chunks) - 1)
        scheduler.run(Batch([request], [start], [count]))
        start += count
    request.inflight_middle_chunks = 0
    request.output_ids_through_stop.append(7)


def decode(scheduler, request, count):
    for _ in range(count):
        position = len(request.origin_input_ids) + len(request.output_ids_through_stop) - 1
        scheduler.run(Batch([request], [position], [1], decode=True))
        request.output_ids_through_stop.append(7)


def test_every_chunk_of_a_prefill_is_in_the_file(scheduler):
    request = Request("a", 300)
    prefill(scheduler, request, [64, 64, 64, 64, 44])
    said = scheduler.finish(request)
    assert said["shape"] == [300, 4, 8]
    assert said["hs_indices"] == [2, 4, 5, 8]
    assert said["norm"] == "post"
    assert said["kv_dtype"] == "bfloat16"
    assert (scheduler.stored(said) == expected(request, 0, 300)).all()


def test_rows_are_taken_at_the_launch_whatever_becomes_of_the_buffer(scheduler):
    request = Request("a", 20)
    scheduler.run(Batch([request], [0], [20]), spoil=True)
    request.output_ids_through_stop.append(7)
    assert (scheduler.stored(scheduler.finish(request)) == expected(request, 0, 20)).all()


def test_decoding_gives_a_row_for_every_token_but_the_last(scheduler):
    request = Request("a", 10)
    prefill(scheduler, request, [10])
    decode(scheduler, request, 600)
    said = scheduler.finish(request)
    assert said["shape"][0] == 610
    assert (scheduler.stored(said) == expected(request, 0, 610)).all()


def test_a_retracted_request_goes_on_with_the_rows_it_had_and_those_of_its_second_prefill(scheduler):
    request = Request("a", 10)
    prefill(scheduler, request, [10])
    decode(scheduler, request, 5)
    request.retraction_count = 1
    # Prefilled again with its output so far; the first four come from the prefix cache.
    scheduler.run(Batch([request], [4], [12]))
    request.output_ids_through_stop.append(7)
    decode(scheduler, request, 3)
    said = scheduler.finish(request)
    assert said["shape"][0] == 19
    assert (scheduler.stored(said) == expected(request, 0, 19)).all()


def test_a_chunk_of_a_retracted_request_does_not_count(scheduler):
    request = Request("a", 20)
    request.is_retracted = True
    scheduler.run(Batch([request], [0], [20]))
    request.is_retracted = False
    request.output_ids_through_stop.append(7)
    said = scheduler.finish(request)
    assert said["error"] == "states.short"
    assert "0 of 20 rows" in said["message"]


def test_a_discarded_last_chunk_does_not_count(scheduler):
    request = Request("a", 20)
    scheduler.run(Batch([request], [0], [20]), last=False)  # SGLang says `store=False`, no chunk follows
    request.output_ids_through_stop.append(7)
    assert scheduler.finish(request)["error"] == "states.short"


def test_tokens_from_the_prefix_cache_are_missed_and_named(scheduler):
    request = Request("a", 20)
    request.cached_tokens = 15
    scheduler.run(Batch([request], [15], [5]))
    request.output_ids_through_stop.append(7)
    said = scheduler.finish(request)
    assert said["error"] == "states.short"
    assert "5 of 20 rows, none for position 0: 15 tokens came from the prefix cache" in said["message"]
    assert scheduler.files() == []


def test_requests_of_one_batch_get_their_own_rows_and_others_none(scheduler):
    one, silent, two = Request("a", 5), Request("b", 7, states=False), Request("c", 3, name="other")
    scheduler.run(Batch([one, silent, two], [0, 0, 0], [5, 7, 3]))
    assert order_of(silent) is None
    for request in (one, two):
        request.output_ids_through_stop.append(7)
    scheduler.run(Batch([one, silent, two], [5, 7, 3], [1, 1, 1], decode=True))
    with scheduler.busy_writers():
        for request in (one, two):
            request.output_ids_through_stop.append(7)
            request.finish()
            assert not scheduler.capture.may_go(request, order_of(request))
    scheduler.wait(one, two)
    assert (scheduler.stored(one.said) == expected(one, 0, 6)).all()
    assert (scheduler.stored(two.said) == expected(two, 0, 4)).all()


def test_only_what_was_asked_for_is_written_in_ascending_order(scheduler):
    request = Request("a", 6, asked={"hs_indices": [8, 4]})
    prefill(scheduler, request, [4, 2])
    said = scheduler.finish(request)
    assert said["hs_indices"] == [4, 8]
    assert (scheduler.stored(said) == expected(request, 0, 6)[:, [1, 3]]).all()


def test_without_the_final_state_there_is_no_norm(scheduler):
    request = Request("a", 6, asked={"hs_indices": [2, 4, 5]})
    prefill(scheduler, request, [6])
    said = scheduler.finish(request)
    assert said["norm"] == "none"
    assert (scheduler.stored(said) == expected(request, 0, 6)[:, :3]).all()


def test_the_reply_waits_for_the_file_and_has_no_floats(scheduler):
    request = Request("a", 5)
    prefill(scheduler, request, [5])
    request.finish()
    with scheduler.busy_writers():
        assert not scheduler.capture.may_go(request, order_of(request))
        assert scheduler.capture.holding
    scheduler.wait(request)
    assert not scheduler.capture.holding
    assert scheduler.files() == ["file"]
    assert request.return_hidden_states is False


def test_an_aborted_request_leaves_no_file(scheduler):
    request = Request("a", 5)
    prefill(scheduler, request, [5])
    assert scheduler.finish(request, "abort")["error"] == "states.aborted"
    assert scheduler.files() == []
    assert not scheduler.capture.holding


def test_a_client_that_leaves_while_its_reply_is_held_leaves_no_file(scheduler):
    request = Request("abc", 5)
    prefill(scheduler, request, [5])
    request.finish()
    with scheduler.busy_writers():
        assert not scheduler.capture.may_go(request, order_of(request))
        scheduler.capture.abort("ab", everything=False)
    assert scheduler.wait(request)["error"] == "states.aborted"
    assert scheduler.files() == []


def test_a_full_spool_fails_the_request_alone(tmp_path):
    scheduler = Scheduler(tmp_path / "spool", max_bytes=2000)
    large, small = Request("a", 60, name="large"), Request("b", 2, name="small")
    for request in (large, small):
        prefill(scheduler, request, [len(request.origin_input_ids)])
    assert scheduler.finish(large)["error"] == "spool.full"
    assert scheduler.finish(small)["shape"] == [2, 4, 8]
    assert scheduler.files() == ["small"]


def test_more_waiting_than_memory_is_for_counts_as_a_full_spool(tmp_path):
    scheduler = Scheduler(tmp_path / "spool", waiting_bytes=1)
    first, second = Request("a", 5, name="first"), Request("b", 5, name="second")
    with scheduler.busy_writers():
        for request in (first, second):
            prefill(scheduler, request, [5])
        first.finish()
        assert not scheduler.capture.may_go(first, order_of(first))
        assert scheduler.finish(second)["error"] == "spool.full"
    assert scheduler.wait(first)["shape"] == [5, 4, 8]


def test_the_rows_of_a_request_that_is_dropped_without_a_word_go_with_it(scheduler):
    """SGLang forgets a retracted request whose client leaves: no function of the plugin sees it."""
    request = Request("a", 10)
    prefill(scheduler, request, [10])
    decode(scheduler, request, 5)
    assert len(scheduler.files()) == 1  # its prefill is in one that nobody sees
    del request
    gc.collect()  # these batches hold themselves, and it
    scheduler.capture.tidy()
    assert scheduler.files() == []
    assert scheduler.writer.budget.held_bytes == 0


def test_a_request_that_ended_is_none_that_was_dropped(scheduler):
    request = Request("a", 5)
    prefill(scheduler, request, [5])
    scheduler.finish(request)
    del request
    gc.collect()
    scheduler.capture.tidy()
    assert scheduler.files() == ["file"]


def test_a_spool_folder_that_was_taken_away_is_made_again(scheduler):
    shutil.rmtree(scheduler.spool.folder)
    request = Request("a", 5)
    prefill(scheduler, request, [5])
    assert scheduler.finish(request)["shape"] == [5, 4, 8]


def test_a_spool_folder_that_cannot_be_made_fails_the_request_alone(tmp_path):
    scheduler = Scheduler(tmp_path / "deep" / "spool")
    shutil.rmtree(tmp_path / "deep")
    request = Request("a", 5)
    prefill(scheduler, request, [5])
    assert scheduler.finish(request)["error"] == "spool.unwritable"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n = 2"),
        ({"asked": {"hs_indices": [3]}}, "this server gives [2, 4, 5, 8]"),
        ({"asked": {"hs_indices": "all"}}, "no list"),
        ({"asked": {"states": "mail"}}, "mail"),
        ({"asked": {"name": "../escape"}}, "folder's name"),
    ],
)
def test_what_cannot_be_asked_is_said_in_the_reply(scheduler, given, words):
    request = Request("a", 5, **given)
    prefill(scheduler, request, [5])
    said = scheduler.finish(request)
    assert said["error"] in ("states.request", "name.unsafe")
    assert words in said["message"]
    assert scheduler.files() == []


def test_tensors_that_are_not_what_was_announced_fail_their_requests_alone(tmp_path):
    def broken(launch, output, facts):
        raise RuntimeError("no memory on the host")

    spool = Spool(tmp_path, "node", 1 << 30)
    scheduler = Scheduler(tmp_path / "spool")
    scheduler.capture = Capture(FACTS, Writer(spool), broken, replies=True)
    request = Request("a", 5)
    prefill(scheduler, request, [5])
    said = scheduler.finish(request)
    assert said["error"] == "plugin.failed"
    assert "no memory on the host" in said["message"]


def test_a_rank_whose_output_reaches_nobody_writes_nothing(tmp_path):
    scheduler = Scheduler(tmp_path / "spool", replies=False)
    request = Request("a", 5)
    prefill(scheduler, request, [5])
    order = order_of(request)
    assert order is not None  # so that SGLang makes no lists of floats there either
    request.finish()
    assert scheduler.capture.may_go(request, order)
    assert scheduler.files() == []
