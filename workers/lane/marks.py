"""Marks: what was in flight when a server died, and so may be what killed it.

    1 death            nothing follows: servers die for many reasons
    2 deaths           a suspect: runs apart from all others, a fifth of the suspects at a time
    more               a fifth of those that have died so often, until the company is 1
    2 deaths alone     it kills servers: a dead letter

A restart by an operator marks everything in flight, and two make suspects of 150 innocents: in
company they lose minutes and not hours, and a killer among them is alone after two more deaths.
Whatever gets its result is cleared. Marks lie in Redis under the order's key, so they outlast
processes; losing them costs a few deaths more. Who waits for whom is in `alone.py`.
"""

import contextlib
from dataclasses import dataclass, replace

from redis import Redis, RedisError

from workers.broker.keys import MARKS

SUSPECT_AT = 2
"""Deaths that make a suspect."""
PARTS = 5
"""Suspects are tried in so many parts: halves would kill the server log2(150) times, single ones
take hours to try."""
ALONE_DEATHS = 2
"""Deaths alone that make a dead letter; one may be an operator's restart at the wrong moment."""
KEPT_S = 7 * 86_400
"""Marks of orders that nobody wants any more go after so long without another death."""


# Values are "deaths company alone". Decided for all of one death at once, while they are all there:
# the company of the last must not be smaller than that of the first.
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

    @property
    def suspect(self) -> bool:
        """Whether it must run apart."""
        return self.deaths >= SUSPECT_AT

    @property
    def guilty(self) -> bool:
        """Whether nothing else can have killed the server."""
        return self.alone >= ALONE_DEATHS

    def died(self) -> "Mark":
        """After one more death."""
        was_alone = self.suspect and self.company == 1
        return Mark(deaths=self.deaths + 1, alone=self.alone + was_alone, company=int(was_alone))


class Marks:
    """The marks of all orders. No method raises when Redis is away: nothing is marked then."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._decide = redis.register_script(DECIDE)

    def read(self, key: str) -> Mark:
        """The order's mark."""
        with contextlib.suppress(RedisError, OSError):
            return _read(self._redis.hget(MARKS, key))
        return Mark()

    def write(self, key: str, mark: Mark) -> None:
        """Replace the order's mark."""
        with contextlib.suppress(RedisError, OSError):
            text = f"{mark.deaths} {mark.company} {mark.alone}"
            pipe = self._redis.pipeline()
            pipe.hset(MARKS, key, text)
            pipe.expire(MARKS, KEPT_S)
            pipe.execute()

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


def count_suspects(redis: Redis) -> int:
    """How many orders run apart, or wait to; raises `RedisError`."""
    return sum(_read(text).suspect for text in redis.hvals(MARKS))


def _read(text: bytes | str | None) -> Mark:
    try:
        deaths, company, alone = map(int, (text or "").split())
    except ValueError:
        return Mark()
    return Mark(deaths=max(0, deaths), company=max(0, company), alone=max(0, alone))
