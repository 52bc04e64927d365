"""Marks: what was in flight when a server died, and so may be what killed it.

    1 death            nothing follows: servers die for many reasons
    2 deaths           a suspect: runs apart from all others, a fifth of the suspects at a time
    more               a fifth of those that have died so often, until the company is 1
    2 deaths alone     it kills servers: a dead letter

A restart by an operator marks everything in flight, and two make suspects of 150 innocents: in
company they lose minutes and not hours, and a killer among them is alone after two more deaths.
A server that dies with nothing marked in flight dies by itself, or of a killer's first death: each
of these past the first raises what it takes to be a suspect, by three at most, so that one that
dies every few minutes does not bring its run to a crawl. Whatever gets its result is cleared.

Marks lie in Redis under the order's key, so they outlast processes; losing them costs a few deaths
more. Who waits for whom is in `alone.py`.
"""

import contextlib
from dataclasses import dataclass, replace

from redis import Redis, RedisError

from workers.broker.keys import MARKS

SUSPECT_AT = 2
"""Deaths that make a suspect."""
PATIENCE = 3
"""Deaths more that it takes, at most, where servers die by themselves."""
PARTS = 5
"""Suspects are tried in so many parts: halves would kill the server log2(150) times, single ones
take hours to try."""
ALONE_DEATHS = 2
"""Deaths alone that make a dead letter; one may be an operator's restart at the wrong moment."""
ONE_DEATH_S = 15
"""Marks at one server within this are of one death: a call finds out in 5 s that nothing answers."""
KEPT_S = 7 * 86_400
"""Marks of orders that nobody wants any more go after so long without another death."""

# Values are "deaths company alone". Beside them lie "unexplained <run>", a count, and
# "death <url>", "began_ms unmarked": whether all that was in flight had no mark before.
DIED = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local key, death, unexplained, had_mark = ARGV[1], ARGV[3], ARGV[4], ARGV[5] == '1'
redis.call('HSET', KEYS[1], key, ARGV[2])
local began, unmarked = string.match(redis.call('HGET', KEYS[1], death) or '', '^(%d+) ([01])$')
if not began or now - tonumber(began) > tonumber(ARGV[6]) then
  redis.call('HSET', KEYS[1], death, string.format('%d %d', now, had_mark and 0 or 1))
  if not had_mark then redis.call('HINCRBY', KEYS[1], unexplained, 1) end
elseif unmarked == '1' and had_mark then
  redis.call('HSET', KEYS[1], death, began .. ' 0')
  redis.call('HINCRBY', KEYS[1], unexplained, -1)
end
redis.call('EXPIRE', KEYS[1], ARGV[7])
"""

# Decided for all of one death at once, while they are all there: the company of the last must not
# be smaller than that of the first.
DECIDE = """
local deaths, alike = tonumber(ARGV[2]), 0
local raw, undecided = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #raw, 2 do
  local died, company, alone = string.match(raw[i + 1], '^(%d+) (%d+) (%d+)$')
  if died and tonumber(died) >= deaths then
    alike = alike + 1
    if tonumber(died) == deaths then
      if raw[i] == ARGV[1] and tonumber(company) > 0 then return tonumber(company) end
      if company == '0' then undecided[#undecided + 1] = {raw[i], alone} end
    end
  end
end
local company = math.max(1, math.floor(alike / tonumber(ARGV[3])))
for _, one in ipairs(undecided) do
  redis.call('HSET', KEYS[1], one[1], string.format('%d %d %s', deaths, company, one[2]))
end
return company
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One order's record."""

    deaths: int = 0
    """Servers that died while it was in flight there."""
    company: int = 0
    """How many suspects may be in flight with it, itself included; 0 until that is decided."""
    alone: int = 0
    """Deaths while its company was 1."""
    unexplained: int = 0
    """Of the run: deaths of servers with nothing in flight that had a mark before."""

    @property
    def suspect(self) -> bool:
        """Whether it must run apart."""
        return self.deaths >= SUSPECT_AT + min(PATIENCE, max(0, self.unexplained - 1))

    @property
    def guilty(self) -> bool:
        """Whether nothing else can have killed the server."""
        return self.alone >= ALONE_DEATHS + (self.unexplained > PATIENCE)

    def died(self) -> "Mark":
        """After one more death."""
        was_alone = self.suspect and self.company == 1
        return replace(self, deaths=self.deaths + 1, alone=self.alone + was_alone, company=int(was_alone))

    def __str__(self) -> str:
        return f"{self.deaths} {self.company} {self.alone}"


class Marks:
    """The marks of all orders. No method raises when Redis is away: nothing is marked then."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._decide = redis.register_script(DECIDE)
        self._died = redis.register_script(DIED)

    def read(self, key: str) -> Mark:
        """The order's mark."""
        with contextlib.suppress(RedisError, OSError):
            text, unexplained = self._redis.hmget(MARKS, key, _unexplained(key))
            return replace(_read(text), unexplained=_count(unexplained))
        return Mark()

    def died(self, key: str, mark: Mark, url: str) -> Mark:
        """The order's mark after this server died with it in flight."""
        after = mark.died()
        with contextlib.suppress(RedisError, OSError):
            self._died(
                keys=[MARKS],
                args=[
                    *(key, str(after), f"death {url}", _unexplained(key), int(mark.deaths > 0)),
                    *(ONE_DEATH_S * 1000, KEPT_S),
                ],
            )
        return after

    def with_company(self, key: str, mark: Mark) -> Mark:
        """The suspect's mark with its company decided: a part of those marked as often."""
        if mark.company:
            return mark
        with contextlib.suppress(RedisError, OSError):
            return replace(mark, company=int(self._decide(keys=[MARKS], args=[key, mark.deaths, PARTS])))
        return replace(mark, company=1)

    def clear(self, key: str) -> None:
        """The order has its result."""
        with contextlib.suppress(RedisError, OSError):
            self._redis.hdel(MARKS, key)


def count_suspects(redis: Redis, run_id: str) -> int:
    """How many of the run's orders run apart, or wait to; raises `RedisError`."""
    found = redis.hgetall(MARKS).items()
    marks = {key.decode(errors="replace") if isinstance(key, bytes) else key: text for key, text in found}
    unexplained = _count(marks.get(_unexplained(f"-{run_id[:8]}")))
    own = (_read(text) for key, text in marks.items() if key.endswith(f"-{run_id[:8]}"))
    return sum(replace(mark, unexplained=unexplained).suspect for mark in own)


def _unexplained(key: str) -> str:
    """The field of the run of this order, whose key ends with its id's beginning."""
    return f"unexplained {key.rpartition('-')[2]}"


def _read(text: bytes | str | None) -> Mark:
    try:
        deaths, company, alone = map(int, (text or "").split())
    except ValueError:
        return Mark()
    return Mark(deaths=max(0, deaths), company=max(0, company), alone=max(0, alone))


def _count(text: bytes | str | None) -> int:
    try:
        return max(0, int(text or 0))
    except ValueError:
        return 0
