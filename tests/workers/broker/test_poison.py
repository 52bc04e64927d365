"""Servers that die in mid-call: who is marked, who runs apart, and that innocents come through."""

import time
from collections.abc import Iterator

import pytest
import redis
from broker_stage import RUN, Paced, Stage, until

from workers.broker.messages import Failed, Responded
from workers.broker.publish import order_key
from workers.lane.marks import Mark, Marks, count_suspects


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def marks_of(stage: Stage) -> list[bytes]:
    """The marks of orders, without what is counted beside them."""
    return [text for key, text in stage.redis.hgetall("eyas:marks").items() if b" " not in key]


def kill_and_restart(stage: Stage, server: Paced, *, seconds: float, in_flight: int) -> Paced:
    """SIGKILL with so many calls in flight, as an operator in a hurry does it."""
    until(lambda: server.stats()["in_flight"] == in_flight, f"{in_flight} are in flight")
    server.process.kill()
    until(lambda: not stage.unacked(), "the calls are back in the queue")
    return stage.server(seconds=seconds, port=server.port)


def test_an_operators_two_restarts_cost_nobody_anything_but_a_while_in_smaller_company(stage: Stage) -> None:
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,), concurrency={"short": 20})
    stage.publish(stage.orders(20))
    stage.worker(capacity=20)
    server = kill_and_restart(stage, server, seconds=60, in_flight=20)
    server = kill_and_restart(stage, server, seconds=1.0, in_flight=20)
    until(lambda: server.stats()["ended"] >= 4, "some are done")
    assert len([text for text in marks_of(stage) if text.startswith(b"2 4 ")]) >= 12
    stage.publish(stage.orders(20, first=100))
    until(lambda: stage.waiting("sink") >= 20, "all suspects are done", within_s=60)
    assert server.stats()["peak"] == 4, "a fifth of them at a time"
    until(lambda: stage.waiting("sink") == 40, "and the others")
    assert all(isinstance(result, Responded) for result in stage.results())
    assert server.stats()["peak"] > 4, "as many as ever"
    assert server.stats()["started"] == 40, "nothing ran twice"
    until(lambda: not marks_of(stage), "nobody is marked any more")
    until(lambda: not stage.redis.hlen("eyas:alone"), "nobody waits to be alone")


def test_a_suspect_waits_for_every_lane_and_the_other_server_goes_on(stage: Stage) -> None:
    busy, free = stage.server(seconds=60), stage.server(seconds=0.1)
    stage.settings(server_urls=(busy.url,), concurrency={"short": 4, "long": 2})
    stage.worker("short", name="short")
    stage.worker("long", name="long")
    stage.publish(stage.orders(2, lane="long", first=900))
    until(lambda: busy.stats()["in_flight"] == 2, "the long lane has calls in flight")
    (suspect,) = stage.orders(1)
    stage.redis.hset("eyas:marks", order_key(suspect), "2 0 0")
    stage.publish([suspect])
    until(lambda: stage.redis.hlen("eyas:alone") == 1, "it claims the server")
    until(lambda: (s := stage.snapshot()) and s["servers"][0]["slots"] == 0, "and its lane has no slots")
    stage.publish(stage.orders(4, first=100))
    until(lambda: stage.waiting() == 4 or stage.unacked() > 3, "others come")
    assert busy.stats()["in_flight"] == 2
    stage.settings(server_urls=(busy.url, free.url))
    until(lambda: stage.waiting("sink") == 4, "the others are done elsewhere")
    assert busy.stats()["in_flight"] == 2
    busy.set(release=True)
    until(lambda: stage.waiting("sink") == 6 and busy.stats()["in_flight"] == 1, "it is alone")
    busy.set(release=True)
    until(lambda: stage.waiting("sink") == 7, "and has its result")


def test_dying_alone_twice_is_a_dead_letter_and_its_mark_is_gone(stage: Stage) -> None:
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,), concurrency={"short": 4})
    (order,) = stage.orders(1)
    stage.publish([order])
    stage.worker()
    for deaths in range(1, 5):
        server = kill_and_restart(stage, server, seconds=60, in_flight=1)
        if deaths < 4:
            until(lambda d=deaths: marks_of(stage)[0].startswith(b"%d " % d), "it is marked")
    until(lambda: stage.waiting("sink") == 1, "it has its outcome")
    (result,) = stage.results()
    assert isinstance(result, Failed)
    assert (result.failure.code, result.failure.attempts) == ("prompt.kills_server", 4)
    assert server.url in result.failure.message
    until(lambda: not marks_of(stage), "a retry begins without a mark")


def test_a_server_that_refuses_or_says_503_marks_nobody(stage: Stage) -> None:
    server = stage.server(seconds=0.2)
    server.set(failing="503")
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(10))
    stage.worker()
    until(lambda: (s := stage.snapshot()) and s["servers"] and s["servers"][0]["state"] == "away", "away")
    server.process.kill()
    until(lambda: not stage.unacked(), "nothing is held")
    assert stage.redis.hlen("eyas:marks") == 0


def test_the_company_is_a_fifth_of_those_marked_as_often_and_stays_what_it_was(client: redis.Redis) -> None:
    marks = Marks(client)
    for at in range(30):
        client.hset("eyas:marks", f"{at}", "2 0 0" if at < 25 else "1 0 0")
    assert not marks.read("29").suspect
    first = marks.with_company("0", marks.read("0"))
    assert first.company == 5
    for at in range(1, 25):
        marks.clear(f"{at}")
        if at == 7:
            assert marks.with_company("8", Mark(deaths=2)).company == 5, "as decided for the first"
    assert marks.with_company("0", marks.read("0")).company == 5, "and still, though it is the last"
    again = marks.with_company("0", marks.died("0", first, "http://a:1"))
    assert (again.deaths, again.company, again.alone) == (3, 1, 0), "in company is not alone"
    alone = again.died()
    assert (alone.alone, alone.guilty) == (1, False)
    assert alone.died().guilty


def test_marks_that_cannot_be_read_are_none(client: redis.Redis) -> None:
    client.hset("eyas:marks", mapping={"a": "nonsense", "b": "1 2", "c": "-3 -1 -9"})
    marks = Marks(client)
    assert [marks.read(key) for key in "abcd"] == [Mark()] * 4


def test_servers_that_die_by_themselves_make_it_harder_to_be_a_suspect(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.lane.marks.ONE_DEATH_S", 0)
    marks = Marks(client)

    def die(*names: str) -> list[Mark]:
        time.sleep(0.002)  # another death is at another moment
        found = [(f"{name}-{RUN[:8]}", marks.read(f"{name}-{RUN[:8]}")) for name in names]
        for key, mark in found:
            marks.died(key, mark, "http://a:1")
        return [marks.read(key) for key, _ in found]

    assert [mark.suspect for mark in (*die("killer"), *die("killer"))] == [False, True]
    for at in range(6):
        die(f"unlucky {at}")
    assert count_suspects(client, RUN) == 0, "seven deaths came out of the blue"
    assert [die("killer")[0].suspect for _ in range(3)] == [False, False, True]
    assert count_suspects(client, RUN) == 1
    assert count_suspects(client, "f" * 32) == 0, "another run's"


def test_marks_of_one_death_are_one_death(client: redis.Redis) -> None:
    marks = Marks(client)
    keys = [f"{at}-{RUN[:8]}" for at in range(5)]
    for key in keys:
        marks.died(key, marks.read(key), "http://a:1")
    assert marks.read(keys[0]).unexplained == 1
    marks.died("late-" + RUN[:8], Mark(deaths=1), "http://a:1")
    assert marks.read(keys[0]).unexplained == 0, "something marked was in flight too"
