"""The feeder's role: one holder at a time, by a lease in Redis.

The holder renews in a thread of its own, so that a long step does not cost it the role. It counts
the lease on its own clock from before each renewal was sent, so it stops before anybody else may
begin, even when it cannot reach Redis. What the holder does is in `feeder.py`.
"""

import contextlib
import threading
import time
import uuid
from types import TracebackType
from typing import Self

from redis import Redis, RedisError

from storage.errors import EyasError
from workers.broker.keys import FEEDER

LEASE_S = 15.0
RENEW = 1 / 3
"""After this part of the lease it is renewed, so that two renewals may fail."""
TRUST = 0.85
"""The holder stops after this part of the lease: clocks drift, and threads wait for their turn."""

RENEW_SCRIPT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
RELEASE_SCRIPT = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)


class RoleLostError(EyasError):
    """Somebody else may feed by now: the holder stops at once."""


class Role:
    """The role, held from `take` until `release`, or until it could not be renewed in time."""

    def __init__(self, redis: Redis, name: str, lease_s: float = LEASE_S) -> None:
        self.holder = f"{name} {uuid.uuid4().hex[:8]}"
        """Unlike any other: a process that restarts under its old name is another holder."""
        self._redis, self._lease_s = redis, lease_s
        self._good_until = 0.0
        self._stop = threading.Event()
        self._renewer: threading.Thread | None = None

    def take(self) -> bool:
        """Whether the role is held now: it was free.

        Raises `RedisError` when Redis is away.
        """
        asked = time.monotonic()
        if not self._redis.set(FEEDER, self.holder, nx=True, px=int(self._lease_s * 1000)):
            return False
        self._good_until = asked + TRUST * self._lease_s
        self._stop.clear()
        self._renewer = threading.Thread(target=self._renew, name="feeder-role", daemon=True)
        self._renewer.start()
        return True

    @property
    def held(self) -> bool:
        """Whether nobody else may hold it now."""
        return time.monotonic() < self._good_until

    def check(self) -> None:
        """Raises `RoleLostError` unless the role is held, as far as is known here."""
        if not self.held:
            raise RoleLostError(f"`{self.holder}` feeds no more", code="feeder.lost")

    def confirm(self) -> None:
        """Raises `RoleLostError` unless the role is held, by Redis' word too.

        A Redis that lost its data gives the role to the next who asks, whatever we renewed.
        """
        if holder_of(self._redis) != self.holder:
            self._good_until = 0.0
        self.check()

    def release(self) -> None:
        """Give the role back, for another to take at once."""
        self._stop.set()
        if self._renewer is not None:
            self._renewer.join()
        self._good_until = 0.0
        with contextlib.suppress(RedisError, OSError):
            self._redis.eval(RELEASE_SCRIPT, 1, FEEDER, self.holder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _renew(self) -> None:
        while not self._stop.wait(RENEW * self._lease_s):
            asked = time.monotonic()
            try:
                renewed = self._redis.eval(RENEW_SCRIPT, 1, FEEDER, self.holder, int(self._lease_s * 1000))
            except (RedisError, OSError):
                if not self.held:
                    return
                continue
            if not renewed:
                # Redis lost its data, or the lease ended while we could not reach it.
                self._good_until = 0.0
                return
            self._good_until = asked + TRUST * self._lease_s


def holder_of(redis: Redis) -> str | None:
    """Who holds the role now."""
    held = redis.get(FEEDER)
    if held is None:
        return None
    return held.decode() if isinstance(held, bytes) else held
