"""Committing a batch: what is stored, what is given back to the feeder, what becomes a dead letter."""

import dataclasses
import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis

import storage
from storage.index import Index, Outcome
from storage.run import StatesMode
from storage.sample import Finish, Stage, Timings
from storage.spool import Spool
from storage.store import Store
from tests.workers.sink.conftest import QuickHost
from tests.workers.sink.making import (
    CAPTURE,
    make_failure,
    make_prompts,
    make_response,
    make_states,
    make_store,
    make_values,
)
from workers.broker.keys import FACTS, WINDOW, window_field
from workers.broker.messages import Captured, Failed, Responded, Result
from workers.sink.commit import Sink
from workers.sink.wasted import Wasted


class Bench:
    def __init__(self, store: Store, spool: Spool, client: redis.Redis, host: QuickHost) -> None:
        self.store, self.spool, self.client, self.host = store, spool, client, host
        self.sink = Sink(store=store, spool=spool, redis=client, host=host)
        self.run = store.run.id
        client.hset(FACTS, "facts1", json.dumps({"model_path": "tiny"}))

    def commit(self, *results: Result):
        tally = self.sink.commit(results, CAPTURE)
        self.sink.free(results)
        return tally

    def outcomes(self, name: str = "B1") -> list[int]:
        index = Index(Store.open(self.store.path), CAPTURE.name)
        index.refresh()
        return index.dataset(name).outcome.tolist()


@pytest.fixture
def bench(tmp_path: Path, spool: Spool, client: redis.Redis, host: QuickHost) -> Bench:
    return Bench(make_store(tmp_path / "out", {"B1": 6}), spool, client, host)


def test_a_batch_of_everything_is_stored_and_its_spool_freed(bench: Bench) -> None:
    first, second, third, *_ = make_prompts("B1", 6)
    response = make_response(first)
    bench.commit(Responded(run=bench.run, response=response))
    tally = bench.commit(
        Captured(run=bench.run, states=make_states(bench.spool, response)),
        Responded(run=bench.run, response=make_response(second)),
        Failed(run=bench.run, failure=make_failure(third)),
    )
    assert (tally.responses, tally.states, tally.failures, tally.duplicates) == (1, 1, 1, 0)
    assert bench.outcomes()[:4] == [Outcome.STORED, Outcome.RESPONDED, Outcome.DEAD, Outcome.NONE]
    assert bench.spool.used_bytes() == 0
    sample = storage.open(bench.store.path).sample(first.id)
    assert np.array_equal(sample.states, make_values(response))


def test_facts_are_stored_before_what_names_them(bench: Bench) -> None:
    bench.commit(Responded(run=bench.run, response=make_response(make_prompts("B1", 1)[0])))
    facts = json.loads((bench.store.path / "facts" / "facts1.json").read_bytes())
    assert facts == {"model_path": "tiny"}


def test_facts_that_redis_has_lost_do_not_hold_up_samples(bench: Bench) -> None:
    bench.client.delete(FACTS)
    bench.commit(Responded(run=bench.run, response=make_response(make_prompts("B1", 1)[0])))
    assert bench.outcomes()[0] == Outcome.RESPONDED


def test_facts_that_redis_learns_again_are_stored_with_the_next_batch(bench: Bench) -> None:
    first, second = make_prompts("B1", 2)
    bench.client.delete(FACTS)
    bench.commit(Responded(run=bench.run, response=make_response(first)))
    bench.client.hset(FACTS, "facts1", json.dumps({"model_path": "tiny"}))
    bench.commit(Responded(run=bench.run, response=make_response(second)))
    assert json.loads((bench.store.path / "facts" / "facts1.json").read_bytes()) == {"model_path": "tiny"}


def test_the_same_batch_again_changes_nothing_and_has_cost_no_call(bench: Bench) -> None:
    prompt = make_prompts("B1", 1)[0]
    response = make_response(prompt)
    batch = (
        Responded(run=bench.run, response=response),
        Captured(run=bench.run, states=make_states(bench.spool, response)),
    )
    bench.sink.commit(batch, CAPTURE)
    tally = bench.commit(*batch)
    assert (tally.responses, tally.states, tally.duplicates) == (0, 0, 2)
    assert tally.wasted.calls == 0, "the same results, come again"
    assert len(list((bench.store.path / "states" / "eagle3").glob("s-*"))) == 1


def test_calls_made_for_what_is_stored_are_counted_with_their_tokens(bench: Bench) -> None:
    first, second, third = make_prompts("B1", 3)
    response = make_response(first)
    bench.commit(
        Responded(run=bench.run, response=response),
        Captured(run=bench.run, states=make_states(bench.spool, response)),
    )
    other = make_response(first, answer=(5, 6), timings=Timings(e2e_s=2.0))
    slower = replace(response, timings=Timings(e2e_s=9.0))
    twice = [make_response(second, timings=Timings(e2e_s=at)) for at in (1.0, 2.0)]
    given = make_response(third, finish=Finish.GIVEN)
    tally = bench.commit(
        Responded(run=bench.run, response=other),  # 2 tokens
        Responded(run=bench.run, response=slower),  # the same 3, from another call
        Captured(run=bench.run, states=make_states(bench.spool, response)),  # all rows
        *(Responded(run=bench.run, response=each) for each in twice),  # 3, in one batch
        Responded(run=bench.run, response=given),
        Responded(run=bench.run, response=given),
        Failed(run=bench.run, failure=make_failure(first)),  # 0
    )
    assert tally.wasted == Wasted(calls=5, tokens=2 + 3 + len(response.tokens) + 3)
    assert storage.open(bench.store.path).sample(first.id).tokens.tolist() == response.tokens.tolist()


def test_states_without_their_spool_file_are_not_stored_and_leave_the_window(bench: Bench) -> None:
    response = make_response(make_prompts("B1", 1)[0])
    bench.commit(Responded(run=bench.run, response=response))
    states = make_states(bench.spool, response)
    bench.client.hset(WINDOW, window_field(response.id, Stage.CAPTURE), "B1")
    bench.spool.delete(states.spool)
    tally = bench.commit(Captured(run=bench.run, states=states))
    assert tally.lost == 1
    assert bench.outcomes()[0] == Outcome.RESPONDED
    assert bench.client.hlen(WINDOW) == 0


def test_states_lost_again_and_again_are_never_a_dead_letter_and_the_sink_says_why(bench: Bench) -> None:
    response = make_response(make_prompts("B1", 1)[0])
    bench.commit(Responded(run=bench.run, response=response))
    for _ in range(7):
        states = make_states(bench.spool, response)
        bench.spool.delete(states.spool)
        bench.commit(Captured(run=bench.run, states=states))
    assert bench.outcomes()[0] == Outcome.RESPONDED
    assert len(bench.host.reasons) == 2 * 6  # all but the first, each paused and resumed
    assert "EYAS_SPOOL_DIR" in bench.host.reasons[0]
    bench.commit(Captured(run=bench.run, states=make_states(bench.spool, response)))
    assert bench.outcomes()[0] == Outcome.STORED
    assert list(bench.store.failures()) == []


def test_unfit_states_are_captured_again_and_at_the_third_time_a_dead_letter(bench: Bench) -> None:
    response = make_response(make_prompts("B1", 1)[0])
    bench.commit(Responded(run=bench.run, response=response))
    for times in (1, 2, 3):
        values = make_values(response)
        values[0, 1] = 0  # what a lane of another node cannot see
        states = make_states(bench.spool, response)
        states = dataclasses.replace(states, spool=bench.spool.write(states.spool.name, values))
        bench.client.hset(WINDOW, window_field(response.id, Stage.CAPTURE), "B1")
        tally = bench.commit(Captured(run=bench.run, states=states))
        assert (tally.states, tally.lost) == (0, 0)
        assert bench.outcomes()[0] == (Outcome.RESPONDED if times < 3 else Outcome.DEAD)
        assert bench.client.hlen(WINDOW) == (0 if times < 3 else 1)
    (failure,) = bench.store.failures()
    assert (failure.code, failure.attempts, failure.stage) == ("states.zero", 3, Stage.CAPTURE)


def test_inline_states_that_are_always_unfit_do_not_let_a_prompt_be_generated_for_ever(
    tmp_path: Path, spool: Spool, client: redis.Redis, host: QuickHost
) -> None:
    bench = Bench(make_store(tmp_path / "out", {"B1": 1}, states=StatesMode.INLINE), spool, client, host)
    for times in (1, 2, 3):
        response = make_response(make_prompts("B1", 1)[0], answer=(times, 6))  # another one each time
        states = make_states(spool, response)
        values = make_values(response)
        values[0, 1] = 0
        states = replace(states, spool=spool.write(states.spool.name, values))
        bench.commit(Responded(run=bench.run, response=response, states=states))
        assert bench.outcomes() == [Outcome.NONE if times < 3 else Outcome.DEAD]


def test_a_fault_in_counting_wasted_calls_keeps_nothing_from_being_stored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise IndexError

    monkeypatch.setattr("workers.sink.wasted._same_call", fail)
    first, second, *_ = make_prompts("B1", 6)
    bench.commit(Responded(run=bench.run, response=make_response(first)))
    tally = bench.commit(
        Responded(run=bench.run, response=make_response(first)),
        Responded(run=bench.run, response=make_response(second)),
    )
    assert (tally.responses, tally.wasted.calls) == (1, 0)


def test_inline_states_are_committed_before_their_response(
    tmp_path: Path, spool: Spool, client: redis.Redis, host: QuickHost
) -> None:
    bench = Bench(make_store(tmp_path / "out", {"B1": 1}, states=StatesMode.INLINE), spool, client, host)
    response = make_response(make_prompts("B1", 1)[0])
    states = make_states(spool, response, rows=len(response.tokens) - 1)
    bench.commit(Responded(run=bench.run, response=response, states=states))
    assert bench.outcomes() == [Outcome.STORED]
    times = [
        next((bench.store.path / part).glob("s-*")).stat().st_ctime_ns
        for part in ("states/eagle3", "responses")
    ]
    assert times == sorted(times)


def test_inline_states_that_are_lost_take_their_response_with_them(
    tmp_path: Path, spool: Spool, client: redis.Redis, host: QuickHost
) -> None:
    bench = Bench(make_store(tmp_path / "out", {"B1": 1}, states=StatesMode.INLINE), spool, client, host)
    response = make_response(make_prompts("B1", 1)[0])
    states = make_states(spool, response)
    (spool.folder / states.spool.name).write_bytes(b"torn")
    client.hset(WINDOW, window_field(response.id, Stage.GENERATE), "B1")
    tally = bench.commit(Responded(run=bench.run, response=response, states=states))
    assert (tally.lost, tally.responses) == (1, 0)
    assert bench.outcomes() == [Outcome.NONE]
    assert client.hlen(WINDOW) == 0


def test_one_broken_result_never_holds_up_the_others(bench: Bench) -> None:
    prompts = make_prompts("B1", 6)
    results: list[Result] = [Responded(run=bench.run, response=make_response(p)) for p in prompts[:4]]
    # Counts are int32 in the store, and nothing looks at them before it does.
    results.insert(2, Responded(run=bench.run, response=make_response(prompts[4], retractions=1 << 40)))
    tally = bench.commit(*results)
    assert (tally.responses, tally.refused) == (4, 1)
    assert bench.outcomes()[:5] == [Outcome.RESPONDED] * 4 + [Outcome.DEAD]
    assert [failure.code for failure in bench.store.failures()] == ["sink.refused"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: dataclasses.replace(r, digest=bytes(16)),
        lambda r: dataclasses.replace(r, prompt_length=len(r.tokens) + 1),
        lambda r: dataclasses.replace(r, facts_id="../../run"),
    ],
    ids=["digest", "prompt length", "facts id"],
)
def test_a_response_that_does_not_fit_itself_becomes_a_dead_letter(bench: Bench, spoil) -> None:
    response = spoil(make_response(make_prompts("B1", 1)[0]))
    bench.commit(Responded(run=bench.run, response=response))
    assert bench.outcomes()[0] == Outcome.DEAD


@pytest.mark.parametrize(
    "fields",
    [{"hs_indices": (1, 2, 3)}, {"hs_indices": (0, 2)}, {"capture": "../x"}],
    ids=["layer count", "other layers", "capture name"],
)
def test_states_that_do_not_fit_the_run_become_a_dead_letter(bench: Bench, fields) -> None:
    response = make_response(make_prompts("B1", 1)[0])
    bench.commit(Responded(run=bench.run, response=response))
    tally = bench.commit(Captured(run=bench.run, states=make_states(bench.spool, response, **fields)))
    assert (tally.states, tally.refused, tally.failures) == (0, 1, 1)
    assert bench.spool.used_bytes() == 0


def test_a_store_that_cannot_be_written_is_waited_for(bench: Bench) -> None:
    staging = bench.store.path / ".staging"
    staging.rmdir()
    staging.write_bytes(b"in the way")
    done = threading.Event()

    def commit() -> None:
        bench.commit(Responded(run=bench.run, response=make_response(make_prompts("B1", 1)[0])))
        done.set()

    thread = threading.Thread(target=commit)
    thread.start()
    while not bench.host.reasons:
        assert thread.is_alive()
    assert not done.is_set()
    staging.unlink()
    staging.mkdir()
    assert done.wait(10)
    thread.join()
    assert bench.outcomes()[0] == Outcome.RESPONDED
    assert bench.host.reasons[-1] == ""


def test_results_wait_for_a_damaged_store_to_be_mended_and_are_not_refused_for_it(bench: Bench) -> None:
    prompts = make_prompts("B1", 2)
    bench.commit(Responded(run=bench.run, response=make_response(prompts[0])))
    damaged = bench.store.path / "responses" / "s-00000001" / "id" / "c.0.0"
    good = damaged.read_bytes()
    damaged.write_bytes(bytes(len(good)))
    again = Bench(Store.open(bench.store.path), bench.spool, bench.client, bench.host)
    done = threading.Event()

    def commit() -> None:
        again.commit(Responded(run=again.run, response=make_response(prompts[1])))
        done.set()

    thread = threading.Thread(target=commit)
    thread.start()
    while not bench.host.reasons:
        assert thread.is_alive()
    assert not done.is_set()
    damaged.write_bytes(good)
    assert done.wait(10)
    thread.join()
    assert "id/c.0.0" in bench.host.reasons[0]
    assert bench.outcomes()[:2] == [Outcome.RESPONDED] * 2
