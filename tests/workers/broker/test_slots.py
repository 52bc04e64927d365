"""Slots: grants made in a real Redis by several processes that each know only what they are told."""

import random
from collections.abc import Iterator

import pytest
import redis

from workers.lane.slots import TWIN, Asked, Slots

URL = "http://a:1"


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def process(client: redis.Redis, name: str, *, token: str = "1", ttl_s: float = 30.0) -> Slots:
    return Slots(client, "short", name, token=token, ttl_s=ttl_s, twin_s=3.0)


def ask(slots: Slots, limit: int, *, capacity: int = 150, in_flight: int = 0, url: str = URL) -> int:
    return slots.renew({url: Asked(limit=limit, capacity=capacity, in_flight=in_flight)})[url]


def test_a_process_alone_has_the_whole_limit_but_no_more_than_its_capacity(client: redis.Redis) -> None:
    one = process(client, "one")
    assert ask(one, 150) == 150
    assert ask(one, 150, capacity=100) == 100


def test_a_second_process_gets_its_share_only_once_the_first_has_let_go(client: redis.Redis) -> None:
    one, two = process(client, "one"), process(client, "two")
    assert ask(one, 150) == 150
    assert ask(two, 150) == 0
    assert ask(one, 150, in_flight=150) == 75
    assert ask(two, 150) == 0, "the first still has 150 in flight"
    assert ask(one, 150, in_flight=100) == 75
    assert ask(two, 150) == 50
    assert ask(one, 150, in_flight=60) == 75
    assert ask(two, 150) == 75


def test_calls_begun_while_a_grant_was_lowered_count_until_the_next_renewal(client: redis.Redis) -> None:
    one, two = process(client, "one"), process(client, "two")
    ask(one, 100)
    ask(two, 100)
    # The first read 90 in flight, began ten more calls, and only then was lowered to 50.
    assert ask(one, 100, in_flight=90) == 50
    assert ask(two, 100) == 0


def test_shares_follow_capacity_and_add_up_to_the_limit(client: redis.Redis) -> None:
    processes = {name: process(client, name) for name in ("one", "two", "three")}
    capacities = {"one": 100, "two": 50, "three": 50}
    grants: dict[str, int] = {}
    for _ in range(5):
        for name, slots in processes.items():
            grants[name] = ask(slots, 31, capacity=capacities[name], in_flight=0)
    assert sum(grants.values()) == 31
    assert grants["one"] in (15, 16)


def test_a_limit_of_zero_grants_nothing(client: redis.Redis) -> None:
    one = process(client, "one")
    assert ask(one, 0) == 0


def test_each_server_is_filled_to_its_own_limit(client: redis.Redis) -> None:
    one = process(client, "one")
    wishes = {
        f"http://{host}:1": Asked(limit=limit, capacity=150, in_flight=0)
        for host, limit in {"a": 10, "b": 3}.items()
    }
    assert one.renew(wishes) == {"http://a:1": 10, "http://b:1": 3}


def test_a_process_that_wants_none_leaves_its_share_to_others(client: redis.Redis) -> None:
    one, two = process(client, "one"), process(client, "two")
    ask(one, 10)
    ask(two, 10)
    ask(one, 10, capacity=0)
    ask(one, 10, capacity=0)
    assert ask(two, 10) == 10


def test_the_slots_of_a_dead_process_are_free_after_their_time(client: redis.Redis) -> None:
    one, two = process(client, "one", ttl_s=0.05), process(client, "two", ttl_s=0.05)
    assert ask(one, 10) == 10
    for _ in range(1000):
        if ask(two, 10) == 10:
            return
    raise AssertionError("never freed")


def test_a_restarted_process_takes_over_its_own_record_once_the_old_one_is_silent(
    client: redis.Redis,
) -> None:
    old = Slots(client, "short", "one", token="old", ttl_s=30, twin_s=0.05)
    new = Slots(client, "short", "one", token="new", ttl_s=30, twin_s=0.05)
    assert ask(old, 10) == 10
    assert ask(new, 10) == TWIN, "the old one may be alive"
    for _ in range(1000):
        if ask(new, 10) == 10:
            return
    raise AssertionError("never taken over")


def test_one_that_gave_up_is_out_of_the_shares_at_once(client: redis.Redis) -> None:
    one, two = process(client, "one"), process(client, "two")
    ask(one, 10)
    one.give_up([URL])
    assert ask(two, 10) == 10


def test_nonsense_in_the_hash_is_removed_and_harms_nobody(client: redis.Redis) -> None:
    client.hset("eyas:slots:short", mapping={"nonsense": "x", f"{URL} other": "1 2", "": ""})
    assert ask(process(client, "one"), 10) == 10
    assert client.hlen("eyas:slots:short") == 1


@pytest.mark.parametrize("seed", range(3))
def test_whatever_processes_do_their_calls_never_exceed_the_limit(client: redis.Redis, seed: int) -> None:
    """A model of processes that begin and end calls between renewals, and of a limit that changes."""
    rng = random.Random(seed)
    slots = [process(client, f"p{i}") for i in range(4)]
    flying, granted = [0] * 4, [0] * 4
    limit = highest = 40
    renewed = {0, 1, 2, 3}
    for _ in range(600):
        if rng.random() < 0.02:
            limit = rng.choice([0, 3, 10, 40, 80])
            highest, renewed = max(highest, limit), set()
        who = rng.randrange(4)
        told = flying[who]
        # Between reading the count and Redis' answer, more calls begin under the old grant.
        flying[who] = max(told, rng.randint(0, granted[who]))
        before = sum(flying)
        granted[who] = ask(slots[who], limit, capacity=rng.choice([0, 50]), in_flight=told)
        flying[who] = max(flying[who], rng.randint(0, granted[who]))
        renewed.add(who)
        if len(renewed) == 4:
            assert sum(flying) <= max(limit, before), "a call began above the limit that all know"
            highest = limit if sum(flying) <= limit else highest
        assert sum(flying) <= highest
        ended = rng.randrange(4)
        flying[ended] = rng.randint(0, flying[ended])
