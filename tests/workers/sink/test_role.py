"""The feeder's role: one holder at a time, and who loses it knows before another may begin."""

import threading
import time

import pytest
import redis

from workers.broker.keys import FEEDER
from workers.feeder.role import Role, RoleLostError, holder_of
from workers.feeder.wake import wait_for_wake, wake_feeder


def test_two_ask_and_one_holds(client: redis.Redis) -> None:
    one, other = Role(client, "a"), Role(client, "b")
    with one:
        assert one.take()
        assert not other.take()
        assert one.held
        assert holder_of(client) == one.holder
    assert other.take()
    assert not one.held
    other.release()
    assert holder_of(client) is None


def test_of_many_that_ask_at_once_one_holds(client: redis.Redis) -> None:
    roles = [Role(client, str(at)) for at in range(16)]
    barrier = threading.Barrier(len(roles))
    taken: list[Role] = []

    def ask(mine: Role) -> None:
        barrier.wait()
        if mine.take():
            taken.append(mine)

    threads = [threading.Thread(target=ask, args=(each,)) for each in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    taken[0].release()


def test_who_releases_late_does_not_take_the_role_from_its_next_holder(client: redis.Redis) -> None:
    late = Role(client, "late")
    assert late.take()
    client.delete(FEEDER)
    with Role(client, "next") as following:
        assert following.take()
        late.release()
        assert holder_of(client) == following.holder


def test_a_holder_that_cannot_reach_redis_stops_before_another_may_begin(
    client: redis.Redis, redis_url: str
) -> None:
    with redis.Redis.from_url(redis_url, socket_timeout=0.1) as impatient:
        mine = Role(impatient, "mine", lease_s=0.6)
        other = Role(client, "other", lease_s=0.6)
        assert mine.take()
        client.client_pause(1500, all=True)
        deadline = time.monotonic() + 10
        while not other.take():  # answered when the pause is over; the lease has ended by then
            assert time.monotonic() < deadline
        assert not mine.held
        with pytest.raises(RoleLostError):
            mine.check()
        mine.release()
        assert holder_of(client) == other.holder
        other.release()


def test_a_role_is_renewed_for_as_long_as_it_is_held(client: redis.Redis) -> None:
    mine, other = Role(client, "mine", lease_s=0.3), Role(client, "other", lease_s=0.3)
    assert mine.take()
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert not other.take()
        mine.confirm()
    mine.release()


def test_a_wake_up_is_not_lost_when_nobody_waits_yet(client: redis.Redis) -> None:
    wake_feeder(client)
    wake_feeder(client)
    assert wait_for_wake(client, 5)
    assert not wait_for_wake(client, 0.01)
