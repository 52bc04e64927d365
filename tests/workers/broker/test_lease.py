"""Leases go by Redis' clock, whatever the clocks of the processes say."""

import os
import subprocess
import sys
from pathlib import Path

import redis
from broker_stage import ROOT

from tests.faults.cluster import movable_clock
from workers.broker.keys import UNACKED_INDEX
from workers.broker.lease import Lease


def test_a_lease_that_began_in_the_future_counts_from_now(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        now = client.time()[0]
        client.zadd(UNACKED_INDEX, {"ahead": now + 3600, "behind": now - 30, "new": now})
        Lease(client, 10).renew()
        found = dict(client.zrange(UNACKED_INDEX, 0, -1, withscores=True))
        assert abs(found[b"ahead"] - client.time()[0]) <= 2
        assert found[b"behind"] == now - 30, "another process' lease that is old stays old"
        assert found[b"new"] == now


JUMPED = """
import sys, time, redis
from workers.broker.redis_clock import RedisClock
with redis.Redis.from_url(sys.argv[1]) as client:
    clock = RedisClock()
    before = clock.now() - time.time()
    clock.follow(client)
    print(before, clock.now() - client.time()[0], time.time() - client.time()[0])
"""


def test_a_process_whose_clock_is_an_hour_ahead_has_redis_time(redis_url: str, tmp_path: Path) -> None:
    environment = movable_clock(tmp_path / "clock", str(ROOT))
    (tmp_path / "clock").write_text("3600")
    said = subprocess.run(
        [sys.executable, "-c", JUMPED, redis_url],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    before, of_redis, own = map(float, said.split())
    assert abs(before) < 5, "until Redis was asked, its own clock is all it has"
    assert abs(of_redis) < 5
    assert abs(own - 3600) < 5
