"""Connections to Redis for everything but Celery's own: time-outs set, errors explained.

Celery opens its own connections from the same URL (`celeryconfig.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from storage.errors import UnavailableError, UsageError

CONNECT_TIMEOUT_S = 5.0
TIMEOUT_S = 10.0
"""Longest wait for one reply; nothing we ask for takes Redis that long."""


def connect(url: str) -> redis.Redis:
    """A client that connects at its first command.

    One retry at once: a pooled connection may have died with a Redis that is back by now. Longer
    outages are their callers' business, who know what to do meanwhile. Raises `UsageError` for a
    URL that is none.
    """
    try:
        return redis.Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_keepalive=True,
            health_check_interval=30,
            retry=Retry(NoBackoff(), 1),
        )
    except ValueError as error:
        raise UsageError(
            f"`{without_password(url)}` is not the address of a Redis: {error}",
            code="redis.url",
            hint="set EYAS_REDIS_URL to something like redis://127.0.0.1:6379/0",
        ) from None


def ping_or_explain(url: str) -> redis.Redis:
    """A client whose Redis answers.

    Raises `UnavailableError` with code `redis.away`, and what `connect` raises.
    """
    client = connect(url)
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        raise explained(error, url) from None
    return client


def explained(error: Exception, url: str) -> UnavailableError:
    """What an error of Redis or of the way to it means to the person at the command line."""
    where = without_password(url)
    match error:
        case redis.AuthenticationError():
            return UnavailableError(
                f"Redis at `{where}` refuses the password: {error}",
                code="redis.password",
                hint="set EYAS_REDIS_URL=redis://:PASSWORD@HOST:PORT/0",
            )
        case redis.ResponseError():
            return UnavailableError(
                f"Redis at `{where}` refuses what Eyas writes: {error}",
                code="redis.refuses",
                hint="set EYAS_REDIS_URL to a primary with memory left, then run this again",
            )
    return UnavailableError(
        f"no Redis answers at `{where}`: {error}",
        code="redis.away",
        hint="start one with `producer up`, or set EYAS_REDIS_URL to one that runs",
    )


@contextmanager
def explaining(url: str) -> Iterator[None]:
    """What Redis refuses meanwhile is raised as `explained` says it."""
    try:
        yield
    except redis.RedisError as error:
        raise explained(error, url) from None


def without_password(url: str) -> str:
    """The URL as it may be printed."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
