"""Alone at a server: a right that makes all other grants of slots there 0 for as long as it is claimed.

A call that may kill its server must be the only one in flight, and one that checks another must not
share a batch. Claims lie in Redis, so the right holds over all processes and nodes:

    claimed   the lanes concerned are granted no more calls there (`slots.py`)
    seated    what was in flight there has ended: the call may be made
    released  at once, or after the claim's time when its process was killed

Claims are seated by size of company, largest first, then in the order they came. Several of one kind
may be seated together, as many as their company says; a company of 1 is alone. What the right is used
for is not known here.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from redis import Redis, RedisError

from workers.broker.keys import ALONE, slots_key
from workers.broker.queues import Lane

logger = logging.getLogger(__name__)

EVERY_LANE = tuple(Lane)
LOOK_S = 0.5
"""How often one that waits looks whether waiting still makes sense."""

# Fields are "<url> <claim>", values "arrived_ms expires_ms company seated lanes". A lane is quiet at
# a server when every live record of `slots.py` says 0 granted and 0 in flight; since a record says
# more than that until its process has seen the claim and said once more what it has in flight, no
# call can be on its way then.
SEAT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ttl, slots_ttl = tonumber(ARGV[1]), tonumber(ARGV[2])
local claims = {}
local raw = redis.call('HGETALL', KEYS[1])
for i = 1, #raw, 2 do
  local url, name = string.match(raw[i], '^(%S+) (%S+)$')
  local arrived, expires, company, seated, lanes =
    string.match(raw[i + 1], '^(%d+) (%d+) (%d+) ([01]) (%S+)$')
  if not url or not arrived or tonumber(expires) < now then
    redis.call('HDEL', KEYS[1], raw[i])
  else
    claims[url] = claims[url] or {}
    claims[url][name] = {arrived = tonumber(arrived), company = tonumber(company),
                         seated = seated == '1', lanes = lanes}
  end
end
local function quiet(url, lanes)
  for i = 2, #KEYS do
    if string.find(',' .. lanes .. ',', ',' .. ARGV[i + 1] .. ',', 1, true) then
      local records = redis.call('HGETALL', KEYS[i])
      for j = 1, #records, 2 do
        local granted, flying, renewed = string.match(records[j + 1], '^(%d+) (%d+) %d+ (%d+) ')
        if granted and string.match(records[j], '^(%S+)') == url
           and now - tonumber(renewed) <= slots_ttl
           and (tonumber(granted) > 0 or tonumber(flying) > 0) then
          return false
        end
      end
    end
  end
  return true
end
local function alike(one, other)
  return one.company == other.company and one.lanes == other.lanes
end
local answers = {}
for i = #KEYS + 2, #ARGV, 5 do
  local url, me, company = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  claims[url] = claims[url] or {}
  local there = claims[url]
  local mine = there[me] or {arrived = now}
  mine.company, mine.lanes = company, ARGV[i + 4]
  mine.seated = mine.seated or ARGV[i + 3] == '1'
  there[me] = mine
  if not mine.seated then
    local seated, same, head, first = 0, true, nil, nil
    for name, one in pairs(there) do
      if one.seated then
        seated, same = seated + 1, same and alike(one, mine)
      elseif not head or one.company > head.company or (one.company == head.company
             and (one.arrived < head.arrived or (one.arrived == head.arrived and name < first))) then
        head, first = one, name
      end
    end
    if seated > 0 then
      mine.seated = same and seated < company
    else
      mine.seated = alike(head, mine) and quiet(url, mine.lanes)
    end
  end
  redis.call('HSET', KEYS[1], url .. ' ' .. me,
             string.format('%d %d %d %d %s', mine.arrived, now + ttl, company,
                           mine.seated and 1 or 0, mine.lanes))
  answers[#answers + 1] = mine.seated and 1 or 0
end
redis.call('PEXPIRE', KEYS[1], ttl * 10)
return answers
"""


class NotAloneError(Exception):
    """The right was not waited for any longer; the text says why."""


@dataclass(slots=True)
class _Claim:
    url: str
    name: str
    lanes: str
    company: int
    seated: bool = False


class Alone:
    """One process's claims. `renew` is called once a second for all of them."""

    def __init__(self, redis: Redis, *, ttl_s: float, slots_ttl_s: float) -> None:
        """`ttl_s` after its last renewal a claim is over; `slots_ttl_s` is that of grants."""
        self._redis = redis
        self._ttl_ms, self._slots_ttl_ms = int(ttl_s * 1000), int(slots_ttl_s * 1000)
        self._script = redis.register_script(SEAT)
        self._changed = threading.Condition()
        self._claims: dict[str, _Claim] = {}

    @contextmanager
    def at(
        self,
        url: str,
        *,
        lanes: tuple[Lane, ...] = EVERY_LANE,
        company: int = 1,
        why_not: Callable[[], str] = lambda: "",
    ) -> Iterator[None]:
        """The block runs while no call of these lanes is in flight at the server but its company's.

        Waits for that in the calling thread, which must hold no slot there: it would wait for
        itself. Raises `NotAloneError` as soon as `why_not` says why to wait no longer, and when
        Redis is away.
        """
        claim = _Claim(url=url, name=secrets.token_hex(8), lanes=",".join(sorted(lanes)), company=company)
        with self._changed:
            self._claims[claim.name] = claim
        try:
            self._wait(claim, why_not)
            yield
        finally:
            with self._changed:
                del self._claims[claim.name]
            # Otherwise the claim is over by itself, a little later.
            with suppress(RedisError, OSError):
                self._redis.hdel(ALONE, f"{claim.url} {claim.name}")

    def renew(self) -> None:
        """Keep all claims, and seat those whose turn it is; raises `RedisError` when Redis is away."""
        with self._changed:
            claims = list(self._claims.values())
        self._renew(claims)

    def claimed(self) -> frozenset[str]:
        """Servers at which this process has claims."""
        with self._changed:
            return frozenset(claim.url for claim in self._claims.values())

    def _wait(self, claim: _Claim, why_not: Callable[[], str]) -> None:
        try:
            self._renew([claim])
        except (RedisError, OSError) as error:
            raise NotAloneError(f"Redis is away: {error}") from None
        with self._changed:
            while not claim.seated:
                why = why_not()
                if why:
                    raise NotAloneError(why)
                self._changed.wait(LOOK_S)

    def _renew(self, claims: list[_Claim]) -> None:
        if not claims:
            return
        arguments: list[str | int] = [self._ttl_ms, self._slots_ttl_ms, *EVERY_LANE]
        for claim in claims:
            arguments += [claim.url, claim.name, claim.company, int(claim.seated), claim.lanes]
        keys = [ALONE, *(slots_key(lane) for lane in EVERY_LANE)]
        answers = self._script(keys=keys, args=arguments)
        with self._changed:
            for claim, seated in zip(claims, answers, strict=True):
                claim.seated = bool(seated)
            self._changed.notify_all()
        released = [claim for claim in claims if claim.name not in self._claims]
        if released:
            # Ended while Redis was asked, which has them once more.
            self._redis.hdel(ALONE, *(f"{claim.url} {claim.name}" for claim in released))
