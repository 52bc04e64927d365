"""Who feeds: whoever takes the role, for as long as it can be held.

A sink feeds whenever nobody else does (`feed_while_free` in a thread); `enqueue` publishes the
first window and may go on while no sink is up. What feeding is, is in `feeder.py`.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis import Redis, RedisError

from storage.errors import EyasError
from storage.store import Store
from workers.board.processes import anyone_listening
from workers.broker.connection import connect, explained, ping_or_explain
from workers.broker.messages import Message
from workers.config import Config
from workers.feeder.feeder import Feeder
from workers.feeder.role import LEASE_S, Role, RoleLostError, holder_of
from workers.feeder.wake import wait_for_wake, wake_feeder
from workers.stopping import StoppedError

logger = logging.getLogger(__name__)

STEP_S = 0.5
"""Longest wait between two steps: settings that change reach the lanes within a second."""
LOOK_S = 1.0
"""Between two tries to take the role, and while Redis is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWindow:
    """What `enqueue` has put out."""

    published: int
    """Orders published by this process."""
    waiting: int
    """Orders published and not stored yet, by whomever."""
    finished: bool
    """Whether every wanted prompt has its outcome: there was nothing to do."""
    holder: str | None
    """Who feeds instead of us; None when we did."""


def feed_while_free(
    *,
    store: Store,
    redis: Redis,
    publish: Callable[[Sequence[Message]], object],
    name: str,
    stopping: threading.Event,
    concerned: Callable[[], bool] = lambda: True,
) -> None:
    """Take the role if it is free and feed until it is lost, `stopping`, or not `concerned` any more.

    Raises nothing: what went wrong is logged, and the caller tries again a second later.
    """
    role = Role(redis, name)
    try:
        if not role.take():
            return
        logger.info("feeder.began holder=%r", role.holder)
        with role:
            feeder = Feeder(store=store, redis=redis, publish=publish, role=role)
            while not stopping.is_set() and concerned():
                _one_step(feeder, redis, stopping)
    except RoleLostError:
        logger.warning("feeder.lost holder=%r", role.holder)
    except StoppedError:
        pass  # the process ends while Redis is away
    except (RedisError, OSError, EyasError) as error:
        logger.warning("feeder.stopped error=%r", str(error))
    # The edge of a thread: whatever it is, the next try may go better.
    except Exception:
        logger.exception("feeder.failed")


def _one_step(feeder: Feeder, redis: Redis, stopping: threading.Event) -> None:
    """One step and the wait after it. While Redis is away it waits, for as long as the role holds."""
    try:
        feeder.step()
        if not feeder.more:
            wait_for_wake(redis, STEP_S)
    except (RedisError, OSError) as error:
        logger.info("feeder.waiting error=%r", str(error))
        stopping.wait(LOOK_S)


def feed_first_window(
    config: Config, store: Store, on_progress: Callable[[int], None] = lambda published: None
) -> FirstWindow:
    """Publish until the window is full or nothing is missing, unless somebody else feeds already.

    `on_progress` is told how many orders were published so far. Raises `UnavailableError` when
    Redis is away or goes, and `UnsuitableError` when it carries another run.
    """
    redis = ping_or_explain(config.redis_url)
    try:
        return _feed_first_window(config, store, redis, on_progress)
    except (RedisError, OSError) as error:
        raise explained(error, config.redis_url) from None


def _feed_first_window(
    config: Config, store: Store, redis: Redis, on_progress: Callable[[int], None]
) -> FirstWindow:
    role = Role(redis, _own_name())
    if not _take(role, redis):
        wake_feeder(redis)
        return FirstWindow(published=0, waiting=0, finished=False, holder=holder_of(redis))
    with role:
        feeder = Feeder(store=store, redis=redis, publish=_publisher(config, None), role=role)
        feeder.step()
        while feeder.more:
            on_progress(feeder.done.published)
            feeder.step()
        on_progress(feeder.done.published)
        return FirstWindow(
            published=feeder.done.published, waiting=feeder.waiting, finished=feeder.finished, holder=None
        )


def keep_feeding(config: Config, store: Store, stopping: threading.Event) -> None:
    """Feed whenever nobody else does, until `stopping`: what `enqueue` does while it watches."""
    redis = connect(config.redis_url)
    publish = _publisher(config, stopping)
    while not stopping.is_set():
        feed_while_free(store=store, redis=redis, publish=publish, name=_own_name(), stopping=stopping)
        stopping.wait(LOOK_S)


def _take(role: Role, redis: Redis) -> bool:
    """Whether the role is ours; waits for a lease that nobody living may be renewing to end."""
    deadline = time.monotonic() + LEASE_S + LOOK_S
    while not role.take():
        if anyone_listening(redis).sink_nodes or time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S / 4)
    return True


def _own_name() -> str:
    return f"enqueue@{socket.gethostname()}:{os.getpid()}"


def _publisher(config: Config, stopping: threading.Event | None) -> Callable[[Sequence[Message]], object]:
    from workers.broker.publish import publish_many
    from workers.celery import create_app

    app = create_app(config)
    return lambda messages: publish_many(app, messages, stopping)
