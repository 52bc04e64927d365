"""Counters of processes that come, go and restart, over feeders that do too: none goes back or double."""

import redis
from hypothesis import given
from hypothesis import strategies as st

from workers.board.processes import ProcessSnapshot, ServerSnapshot, ServerState
from workers.board.tally import FORGET_S, Tally, add_up, read_tally, write_tally


def process(name: str, started: float, tokens: int, retractions: int = 0) -> ProcessSnapshot:
    server = ServerSnapshot(url="http://s", state=ServerState.UP, since=0, retractions=retractions)
    return ProcessSnapshot(
        name=name, lane="short", node="n", pid=1, at=0, started=started, tokens=tokens, servers=(server,)
    )


def test_a_process_that_restarts_goes_on_from_the_sum() -> None:
    tally = add_up(Tally(run="r"), [process("a", 1, 100, 2)], now=1)
    tally = add_up(tally, [process("a", 1, 130, 2)], now=2)
    tally = add_up(tally, [process("a", 3, 5, 1)], now=3)
    assert (tally.output_tokens, tally.retractions) == (135, {"http://s": 3})


def test_a_process_that_was_out_of_sight_is_not_counted_twice() -> None:
    tally = add_up(Tally(run="r"), [process("a", 1, 100)], now=0)
    tally = add_up(tally, [], now=FORGET_S - 1)
    assert add_up(tally, [process("a", 1, 110)], now=FORGET_S - 1).output_tokens == 110


def test_the_next_feeder_goes_on_with_what_redis_kept(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        write_tally(client, add_up(Tally(run="r"), [process("a", 1.25, 100)], now=1))
        tally = add_up(read_tally(client, "r"), [process("a", 1.25, 120), process("b", 2, 7)], now=2)
        assert tally.output_tokens == 127
        assert read_tally(client, "another").output_tokens == 0


def test_what_redis_keeps_may_be_damaged(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for text in ("", "[]", '{"run": 3}', '{"run": "r", "lanes": {"short": {"tokens": "many"}}}'):
            client.set("eyas:tally", text)
            assert read_tally(client, "r") == Tally(run="r")


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.booleans(), st.booleans()), max_size=40)
)
def test_the_sum_is_all_that_was_ever_done(events: list[tuple[str, int, bool, bool]]) -> None:
    """A process does some work, may restart, and may be unseen at this look."""
    tally, done, started, total = Tally(run="r"), dict.fromkeys("abc", 0), dict.fromkeys("abc", 0), 0
    before = 0
    for now, (name, work, restarts, unseen) in enumerate(events):
        if restarts:  # its last counts were seen: what dies unseen is lost, and said to be
            tally = add_up(tally, [process(n, started[n], done[n]) for n in "abc"], now=now)
            started[name], done[name] = now + 1, 0
        done[name] += work
        total += work
        seen = [n for n in "abc" if not (unseen and n == name)]
        tally = add_up(tally, [process(n, started[n], done[n]) for n in seen], now=now)
        assert tally.output_tokens >= before
        before = tally.output_tokens
    tally = add_up(tally, [process(n, started[n], done[n]) for n in "abc"], now=len(events))
    assert tally.output_tokens == total
