"""Alone at a server: claims and slots of several processes in a real Redis, each told only its own."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import redis
from broker_stage import until

from workers.broker.queues import Lane
from workers.lane.alone import EVERY_LANE, Alone, NotAloneError
from workers.lane.slots import Asked, Slots

URL, OTHER = "http://a:1", "http://b:1"
CAPTURES = (Lane.CAPTURE,)


class Process:
    """One lane process as Redis sees it: what it is granted, what it has in flight, its claims."""

    def __init__(self, client: redis.Redis, name: str, lane: str = "short") -> None:
        self.slots = Slots(client, lane, name, token=name, ttl_s=30.0, twin_s=3.0)
        self.alone = Alone(client, ttl_s=15.0, slots_ttl_s=30.0)
        self.in_flight = 0

    def pulse(self, limit: int = 10, url: str = URL) -> int:
        """What is granted to it now."""
        granted = self.slots.renew({url: Asked(limit=limit, capacity=100, in_flight=self.in_flight)})[url]
        self.alone.renew()
        return granted


class Claimant:
    """A claim in a thread of its own."""

    def __init__(self, process: Process, pool: ThreadPoolExecutor, **options: object) -> None:
        self.seated, self.leave = threading.Event(), threading.Event()
        self.why = ""
        self.process = process
        self.done: Future[None] = pool.submit(self._run, options)

    def _run(self, options: dict) -> None:
        with self.process.alone.at(URL, why_not=lambda: self.why, **options):
            self.seated.set()
            assert self.leave.wait(30)

    def end(self) -> None:
        self.leave.set()
        self.done.result(10)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as pool:
        yield pool


@contextmanager
def claiming(
    client: redis.Redis, process: Process, pool: ThreadPoolExecutor, **options: object
) -> Iterator[Claimant]:
    before = client.hlen("eyas:alone")
    claimant = Claimant(process, pool, **options)
    until(lambda: client.hlen("eyas:alone") == before + 1, "the claim lies in Redis")
    try:
        yield claimant
    finally:
        claimant.leave.set()
        claimant.why = "the test is over"


def test_a_claim_stops_new_calls_at_once_and_is_seated_when_the_last_old_one_has_ended(
    client: redis.Redis, pool: ThreadPoolExecutor
) -> None:
    short, captures = Process(client, "one"), Process(client, "two", "capture")
    assert (short.pulse(), captures.pulse()) == (10, 10)
    short.in_flight, captures.in_flight = 1, 1
    with claiming(client, short, pool) as claimant:
        for _ in range(3):
            assert (short.pulse(), captures.pulse()) == (0, 0)
        assert not claimant.seated.is_set()
        assert short.pulse(url=OTHER) == 10, "another server is none of its business"
        captures.in_flight = 0
        for _ in range(3):
            assert (captures.pulse(), short.pulse()) == (0, 0)
        assert not claimant.seated.is_set()
        short.in_flight = 0
        for _ in range(2):
            short.pulse()
        assert claimant.seated.wait(10)
        assert (short.pulse(), captures.pulse()) == (0, 0)
        claimant.end()
        assert (short.pulse(), captures.pulse()) == (10, 10)


def test_calls_begun_between_a_renewal_and_its_answer_are_waited_for(
    client: redis.Redis, pool: ThreadPoolExecutor
) -> None:
    process = Process(client, "one")
    assert process.pulse() == 10
    with claiming(client, process, pool) as claimant:
        # It says 0, because its ten calls began after it had counted and before it was answered.
        assert process.pulse() == 0
        assert not claimant.seated.is_set()
        process.in_flight = 10
        process.pulse()
        process.pulse()
        assert not claimant.seated.is_set()
        process.in_flight = 0
        process.pulse()
        process.pulse()
        assert claimant.seated.wait(10)


def test_alone_among_captures_leaves_the_other_lanes_their_slots(
    client: redis.Redis, pool: ThreadPoolExecutor
) -> None:
    short, captures = Process(client, "one"), Process(client, "two", "capture")
    short.pulse(), captures.pulse()
    short.in_flight = 7
    with claiming(client, captures, pool, lanes=CAPTURES) as claimant:
        for _ in range(2):
            captures.pulse()
        assert claimant.seated.wait(10)
        assert (short.pulse(), captures.pulse()) == (10, 0)


def test_one_at_a_time_in_the_order_they_came(client: redis.Redis, pool: ThreadPoolExecutor) -> None:
    processes = [Process(client, name) for name in ("one", "two", "three")]
    with (
        claiming(client, processes[0], pool) as first,
        claiming(client, processes[1], pool) as second,
        claiming(client, processes[2], pool, lanes=CAPTURES) as third,
    ):
        for claimant, later in ((first, [second, third]), (second, [third]), (third, [])):
            for process in reversed(processes):
                process.pulse()
                process.pulse()
            assert claimant.seated.wait(10)
            assert not any(other.seated.is_set() for other in later)
            claimant.end()
    assert client.hlen("eyas:alone") == 0


def test_a_company_is_seated_together_and_never_more_of_it_than_it_says(
    client: redis.Redis, pool: ThreadPoolExecutor
) -> None:
    process, other = Process(client, "one"), Process(client, "two")

    def seated(claimants: list[Claimant]) -> int:
        process.pulse()
        other.pulse()
        time.sleep(0.01)
        return sum(each.seated.is_set() and not each.leave.is_set() for each in claimants)

    with claiming(client, other, pool, company=1) as single:
        claimants = [Claimant(each, pool, company=3) for each in (process, other) * 4]
        until(lambda: single.seated.is_set() or client.hlen("eyas:alone") == 9, "all claim")
        # The first came before the others, and a larger company goes before it nonetheless.
        if single.seated.is_set():
            single.end()
        most = 0
        while any(not each.leave.is_set() for each in claimants):
            until(lambda: seated(claimants) == 3 or not client.hlen("eyas:alone") > 3, "three sit")
            most = max(most, seated(claimants))
            assert most <= 3
            next(c for c in claimants if c.seated.is_set() and not c.leave.is_set()).end()
        assert most == 3


def test_the_claim_of_a_killed_process_frees_the_server_after_its_time(
    client: redis.Redis, pool: ThreadPoolExecutor
) -> None:
    process = Process(client, "one")
    killed = Process(client, "two")
    killed.alone = Alone(client, ttl_s=0.5, slots_ttl_s=30.0)
    with claiming(client, killed, pool) as claimant:
        assert claimant.seated.wait(10)
        assert process.pulse() == 0
        until(lambda: process.pulse() == 10, "nobody renews it")


def test_one_that_waits_no_longer_leaves_no_claim(client: redis.Redis, pool: ThreadPoolExecutor) -> None:
    busy, waiting = Process(client, "one"), Process(client, "two", "capture")
    busy.in_flight = 1
    busy.pulse()
    with claiming(client, waiting, pool) as claimant:
        assert busy.pulse() == 0
        claimant.why = "the server takes no calls"
        with pytest.raises(NotAloneError, match="the server takes no calls"):
            claimant.done.result(10)
    assert client.hlen("eyas:alone") == 0
    assert busy.pulse() == 10


def test_nonsense_among_the_claims_is_removed_and_harms_nobody(
    client: redis.Redis, pool: ThreadPoolExecutor
) -> None:
    client.hset("eyas:alone", mapping={"nonsense": "x", f"{URL} other": "1 2 3", "": "", f"{URL} x": "y"})
    process = Process(client, "one")
    assert process.pulse() == 10
    with claiming_after_nonsense(process, pool) as claimant:
        until(lambda: process.pulse() == 0 and claimant.seated.is_set(), "it is seated")
        assert client.hlen("eyas:alone") == 1


@contextmanager
def claiming_after_nonsense(process: Process, pool: ThreadPoolExecutor) -> Iterator[Claimant]:
    claimant = Claimant(process, pool, lanes=EVERY_LANE)
    try:
        yield claimant
    finally:
        claimant.leave.set()
