"""Slots: how many calls each process may have in flight, so that a lane's limit holds per server.

A grant is made in Redis by one script, for all processes of a lane, on all nodes:

    share_i = limit · capacity_i ÷ Σ capacity
    grant_i = min(share_i, limit − Σ over the others of max(granted_j, in_flight_j))

so their sum never exceeds the limit, also while it changes: a process that lowers its grant goes
on counting as holding the old one until it has said once more what is really in flight. Where
somebody is to be alone (`alone.py`) the limit is 0. Nothing here knows servers' health or Celery;
who counts calls is `lane.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redis import Redis

from workers.broker.keys import ALONE, slots_key

TWIN = -1
"""What the script grants to a process whose name another live process uses."""

# Fields are "<url> <process>", values "granted in_flight capacity renewed_ms token". Shares are
# rounded cumulatively over the processes' names, so that they add up to the limit exactly.
GRANT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local me, token = ARGV[1], ARGV[2]
local ttl, twin = tonumber(ARGV[3]), tonumber(ARGV[4])
local held = {}
local raw = redis.call('HGETALL', KEYS[1])
for i = 1, #raw, 2 do
  local url, name = string.match(raw[i], '^(%S+) (%S+)$')
  local granted, flying, capacity, renewed, whose =
    string.match(raw[i + 1], '^(%d+) (%d+) (%d+) (%d+) (%S+)$')
  if not url or not granted or now - tonumber(renewed) > ttl then
    redis.call('HDEL', KEYS[1], raw[i])
  else
    held[url] = held[url] or {}
    held[url][name] = {granted = tonumber(granted), flying = tonumber(flying),
                       capacity = tonumber(capacity), age = now - tonumber(renewed), token = whose}
  end
end
local shut = {}
local claims = redis.call('HGETALL', KEYS[2])
for i = 1, #claims, 2 do
  local expires, lanes = string.match(claims[i + 1], '^%d+ (%d+) %d+ [01] (%S+)$')
  if expires and tonumber(expires) >= now
     and string.find(',' .. lanes .. ',', ',' .. ARGV[5] .. ',', 1, true) then
    shut[string.match(claims[i], '^(%S*)')] = true
  end
end
local grants = {}
for i = 6, #ARGV, 4 do
  local url = ARGV[i]
  local limit = shut[url] and 0 or tonumber(ARGV[i + 1])
  local capacity, flying = tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local others = held[url] or {}
  local mine = others[me]
  if mine and mine.token ~= token and mine.age < twin then
    grants[#grants + 1] = -1
  else
    others[me] = {granted = 0, flying = 0, capacity = capacity}
    local names, total, taken = {}, 0, 0
    for name, record in pairs(others) do
      names[#names + 1] = name
      total = total + record.capacity
      if name ~= me then taken = taken + math.max(record.granted, record.flying) end
    end
    table.sort(names)
    local share, before = 0, 0
    for _, name in ipairs(names) do
      local after = before + others[name].capacity
      if name == me and total > 0 then
        share = math.floor(limit * after / total) - math.floor(limit * before / total)
      end
      before = after
    end
    local grant = math.max(0, math.min(share, capacity, limit - taken))
    if mine and mine.token == token and mine.granted > grant then
      flying = math.max(flying, mine.granted)
    end
    redis.call('HSET', KEYS[1], url .. ' ' .. me,
               string.format('%d %d %d %d %s', grant, flying, capacity, now, token))
    grants[#grants + 1] = grant
  end
end
redis.call('PEXPIRE', KEYS[1], ttl * 10)
return grants
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a process asks for at one server."""

    limit: int
    """Of the lane there, over all processes."""
    capacity: int
    """What this process could take: its `-c`, or 0 while it wants none there."""
    in_flight: int
    """Calls it has in flight there."""


class Slots:
    """One process's side of the grants."""

    def __init__(
        self, redis: Redis, lane: str, process: str, *, token: str, ttl_s: float, twin_s: float
    ) -> None:
        """`token` tells this process from an earlier or another one of the same name."""
        self._redis = redis
        self._lane = lane
        self._key = slots_key(lane)
        self._process = process
        self._token = token
        self._ttl_ms = int(ttl_s * 1000)
        self._twin_ms = int(twin_s * 1000)
        self._script = redis.register_script(GRANT)

    def renew(self, asked: Mapping[str, Asked]) -> dict[str, int]:
        """URL → slots granted until the next renewal, `TWIN` where another has our name."""
        arguments: list[str | int] = [self._process, self._token, self._ttl_ms, self._twin_ms, self._lane]
        for url, wish in asked.items():
            arguments += [url, wish.limit, wish.capacity, wish.in_flight]
        grants = self._script(keys=[self._key, ALONE], args=arguments)
        return dict(zip(asked, (int(g) for g in grants), strict=True))

    def give_up(self, urls: Sequence[str]) -> None:
        """Take this process out of the shares, once it has nothing in flight there."""
        if urls:
            self._redis.hdel(self._key, *(f"{url} {self._process}" for url in urls))
