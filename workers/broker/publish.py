"""Putting messages into their queues, for as long as it takes.

Celery's own publish retries still lose results when Redis is away at the wrong moment (opening a
pooled connection bypasses its policy), so the retrying is done here. Sending twice is harmless:
both copies carry one publication number, and lanes and the store know duplicates.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from kombu.exceptions import KombuError
from redis import RedisError

from workers.broker.messages import Capture, Captured, Failed, Generate, Message, Responded, encode
from workers.broker.queues import SINK, STORE_TASK, Lane, sink_queue, task_of
from workers.stopping import StoppedError

if TYPE_CHECKING:
    from workers.celery import EyasApp

logger = logging.getLogger(__name__)

BATCH = 500
"""Messages sent in one round trip."""
ORIGIN = "eyas"
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Between attempts; the last one for ever."""


class Outage:
    """Logs once when a process begins to wait for Redis and once when it goes on, not per thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None

    def began(self, error: Exception) -> None:
        """Something could not be sent."""
        with self._lock:
            if self._since is None:
                self._since = time.monotonic()
                logger.warning("publish.waiting error=%r", str(error))

    def ended(self) -> None:
        """Something was sent that had waited."""
        with self._lock:
            if self._since is not None:
                logger.warning("publish.resumed after_s=%.1f", time.monotonic() - self._since)
                self._since = None


def publish(app: "EyasApp", message: Message, stopping: threading.Event | None = None) -> None:
    """Send one message; returns when Redis has it.

    Raises `StoppedError` when `stopping` is set while Redis is away.
    """
    publish_many(app, [message], stopping)


def publish_many(app: "EyasApp", messages: Iterable[Message], stopping: threading.Event | None = None) -> int:
    """Send messages in batches, in order; returns how many when Redis has them all.

    Raises `StoppedError` when `stopping` is set while Redis is away: some may have been sent.
    """
    sent = 0
    iterator = iter(messages)
    while batch := [_envelope(app, message) for message in islice(iterator, BATCH)]:
        _insist(partial(_send, app, batch), stopping, app.outage)
        sent += len(batch)
    return sent


def queue_of(message: Message) -> str:
    """The queue a message belongs to; states go to the node whose spool holds them."""
    match message:
        case Generate():
            return message.lane
        case Capture():
            return Lane.CAPTURE
        case Responded(states=None) | Failed():
            return SINK
        case Responded() | Captured():
            assert message.states is not None
            return sink_queue(message.states.spool.node)


def task_name(message: Message) -> str:
    """The task that takes a message."""
    match message:
        case Generate():
            return task_of(Lane(message.lane))
        case Capture():
            return task_of(Lane.CAPTURE)
        case _:
            return STORE_TASK


def order_key(message: Generate | Capture) -> str:
    """What is to be done, as a task id: the same for every publication of the same order."""
    match message:
        case Generate():
            return f"{message.id.hex()}-g-{message.run[:8]}"
        case Capture():
            return f"{message.id.hex()}-c{message.digest[:4].hex()}-{message.run[:8]}"


def summary(message: Message) -> str:
    """The message in a few words, as Flower shows it."""
    match message:
        case Generate():
            return f"{message.dataset} · {len(message.prompt)} tok"
        case Capture():
            return f"{message.dataset} · {len(message.tokens)} tok"
        case Responded():
            return f"{message.response.dataset} · {len(message.response.tokens)} tok"
        case Captured():
            return f"{message.states.dataset} · {message.states.spool.shape[0]} rows"
        case Failed():
            return f"{message.failure.dataset} · {message.failure.code}"


def _envelope(app: "EyasApp", message: Message) -> tuple[Any, dict[str, Any]]:
    """The body and the arguments of `Producer.publish`, as Celery's protocol wants them."""
    publication = secrets.token_hex(8)
    task_id = order_key(message) if isinstance(message, Generate | Capture) else publication
    task = app.amqp.as_task_v2(
        task_id,
        task_name(message),
        args=(encode(message),),
        # Set here: Celery would put a representation of the whole body beside the body.
        argsrepr=summary(message),
        kwargsrepr="",
        ignore_result=True,
        origin=ORIGIN,
    )
    properties = task.properties | {"correlation_id": publication}
    # The anonymous exchange: the routing key is the queue, and nothing has to be declared.
    return task.body, {
        "headers": task.headers,
        "exchange": "",
        "routing_key": queue_of(message),
        **properties,
    }


def _send(app: "EyasApp", batch: Sequence[tuple[Any, dict[str, Any]]]) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        if len(batch) == 1:
            body, arguments = batch[0]
            producer.publish(body, serializer="msgpack", retry=False, **arguments)
            return
        with producer.batch(BATCH):
            for body, arguments in batch:
                producer.publish(body, serializer="msgpack", retry=False, **arguments)


def _insist(send: Callable[[], None], stopping: threading.Event | None, outage: Outage) -> None:
    """Call `send` until it returns."""
    attempt = 0
    while True:
        try:
            send()
            break
        # Whatever Redis answers, "out of memory" and "loading" included, may be over later; a
        # result thrown away is a call to the server paid twice.
        except (RedisError, KombuError, OSError) as error:
            outage.began(error)
            pause_s = PAUSES_S[min(attempt, len(PAUSES_S) - 1)]
            attempt += 1
            if stopping is None:
                stopping = threading.Event()
            if stopping.wait(pause_s):
                raise StoppedError from error
    if attempt:
        outage.ended()
