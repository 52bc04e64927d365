"""What a worker takes from Redis, and when: Celery's consumer with what Eyas adds to it.

A lane takes an order only while it has room for one, by wrapping `channel.qos.can_consume` as
Celery's own `worker_disable_prefetch` does. What is no message of ours is set aside and
acknowledged; what is a duplicate waits (`flight.py`). A sink's own side is `step.py`.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps
from celery.worker import state
from celery.worker.consumer import Consumer as CeleryConsumer

from workers.broker.garbage import set_aside
from workers.broker.kombu_private import consume_while, survive_garbage, take_unsettled
from workers.lane.flight import Arrival
from workers.lane.lane import Lane

logger = logging.getLogger(__name__)


class Consumer(CeleryConsumer):  # type: ignore[misc]
    """Celery's consumer, which nothing in a queue can stop and no duplicate runs twice."""

    def ensure_connected(self, conn: Any) -> Any:
        """Connect, trying every few seconds: Celery's pauses grow to half a minute."""
        conn.ensure_connection = partial(
            conn.ensure_connection, interval_start=0.2, interval_step=0.5, interval_max=5
        )
        return super().ensure_connected(conn)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """The connection is lost: keep what is running, before Celery closes it."""
        if self.task_consumer is not None:
            qos = self.task_consumer.channel.qos
            if self.app.lane is not None:
                self.app.lease.keep(self.app.carried.take(qos))
            else:
                # What a sink holds comes again when its lease is over. kombu would give it back on the
                # connection that is gone, and fail in a way that ends the process.
                take_unsettled(qos)
        super().on_connection_error_after_connected(exc)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        """What Celery calls with each message of a queue."""
        take = super().create_task_handler(*args, **kwargs)

        def on_message(message: Any) -> None:
            wrong = _why_garbage(message, self.strategies)
            if wrong is not None:
                self._set_aside(message, wrong)
                return
            lane: Lane | None = self.app.lane
            if lane is None or self._admit(lane, message):
                take(message)

        return on_message

    # Celery deletes these with a traceback in the log; the bodies may be needed to find out why.

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """No task message."""
        self._set_aside(message, "no task message")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """A task of another queue or program."""
        self._set_aside(message, f"unknown task {exc}")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        """A task message that contradicts itself."""
        self._set_aside(message, repr(exc))
        lane: Lane | None = self.app.lane
        if lane is not None:
            lane.flight.finish(*names(message), published=True)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """A body in a format that is not accepted, or damaged."""
        self._set_aside(message, repr(exc))

    def _admit(self, lane: Lane, message: Any) -> bool:
        """Whether to run it now; otherwise it is settled, or will be."""
        key, publication = names(message)

        def settle(published: bool) -> None:
            # Called by a task's thread; the connection belongs to Celery's.
            self.call_soon(self.settle, message, published)

        # What is not among Celery's requests has ended without its task, as by `celery revoke`.
        if key not in state.requests:
            lane.flight.finish(key, publication, published=False)
        # An answer to a request that was under way when the room was lost: at most one.
        has_room = lane.room(len(state.reserved_requests)) > 0
        match lane.flight.arrive(key, publication, settle):
            case Arrival.DONE:
                settle(True)
            case Arrival.FIRST if has_room:
                return True
            case Arrival.FIRST:
                lane.flight.finish(key, publication, published=False)
                settle(False)
            case Arrival.WAITS:
                pass
        return False

    def settle(self, message: Any, done: bool) -> None:
        """Acknowledge a message, or give it back."""
        if message.acknowledged:
            return
        if done:
            message.ack_log_error(logger, self.connection_errors)
        else:
            message.reject_log_error(logger, self.connection_errors, requeue=True)

    def _set_aside(self, message: Any, why: str) -> None:
        body = message.body
        body = body if isinstance(body, bytes) else repr(body).encode()
        lane: Lane | None = self.app.lane
        if lane is not None:
            lane.set_aside(body, why)
        else:
            set_aside(self.app.redis, body, why)
        message.ack_log_error(logger, self.connection_errors)


class AdmissionStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Makes each new connection take orders by room, and survive what is no message."""

    name = "Admission"
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: Any) -> None:
        """A connection is there: the first, or another after a loss."""
        channel = consumer.task_consumer.channel
        survive_garbage(channel, partial(set_aside, consumer.app.redis))
        lane: Lane | None = consumer.app.lane
        if lane is None:
            consumer.app.lease.watch(channel.qos)
            return
        carried = consumer.app.carried
        if count := carried.hand_over(channel):
            logger.info("lane.reconnected carried=%d", count)
        consumer.app.lease.watch(channel.qos)
        # Ends with the connection, like every timer begun while connecting.
        consumer.timer.call_repeatedly(
            consumer.app.timing.renew_s, carried.settle_forgotten, (channel.qos, consumer.settle)
        )
        consume_while(channel, lambda: lane.room(len(state.reserved_requests)) > 0)
        lane.when_room(lambda: consumer.call_soon(_nothing))


def _nothing() -> None:
    """Wakes Celery's loop, which then asks `can_consume`."""


def names(message: Any) -> tuple[str, str]:
    """What the message asks for, and which publication of it this is."""
    key = str(message.headers["id"])
    return key, str(message.properties.get("correlation_id") or message.delivery_tag)


def _why_garbage(message: Any, known: Any) -> str | None:
    """Why this is no message of ours; None when it is one, as far as its envelope tells."""
    headers = message.headers
    if not isinstance(headers, dict) or not isinstance(headers.get("id"), str):
        return "no task message"
    task = headers.get("task")
    if not isinstance(task, str) or task not in known:
        return f"unknown task `{task}`"
    try:
        arguments, keywords, _ = message.payload
    # The edge where foreign bytes enter: anything may be in them.
    except Exception as error:
        return f"body cannot be read: {error!r}"
    if not isinstance(arguments, list | tuple) or not all(isinstance(a, bytes) for a in arguments):
        return "arguments of another kind"
    return None if len(arguments) == 1 and not keywords else "other arguments"
