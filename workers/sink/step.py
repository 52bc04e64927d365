"""Celery's side of a sink: receives results without running them, and acknowledges after the commit.

A task's strategy normally hands each message to the pool, whose end acknowledges it. This one puts
the result on the sink's pile; the pool of a sink stays idle. Collecting is in `batching.py`, the
process in `process.py`. Everything that touches the connection happens in Celery's own
thread.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import bootsteps
from celery.worker import state

from storage.store import Store
from workers.broker.kombu_private import consume_while
from workers.broker.messages import Message, MessageError, Result, decode
from workers.broker.publish import publish_many, summary
from workers.broker.queues import SINK
from workers.sink.batching import PREFETCH, Held
from workers.sink.process import SinkProcess

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Delivery:
    """One delivered message, to be acknowledged on the connection it came by."""

    message: Any
    connection: int
    """Which connection of this process: a delivery of an earlier one cannot be acknowledged."""
    said: str
    """The result in a few words, for Flower."""
    received: float = field(default_factory=time.monotonic)

    @property
    def task_id(self) -> str:
        """Celery's id of the task."""
        return str(self.message.headers.get("id"))


class SinkStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Starts the sink with the consumer, ends it with it, and follows its connections."""

    name = "Sink"
    open_store: Callable[[Path], Store] = staticmethod(Store.open)
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self.process: SinkProcess | None = None
        self.connection = 0
        self._consumer = consumer
        self._settled: deque[Delivery] = deque()

    def include_if(self, consumer: Any) -> bool:
        """Only in a process that consumes results."""
        return SINK in consumer.app.amqp.queues.consume_from

    def start(self, consumer: Any) -> None:
        """A connection is there: the first, or another after a loss."""
        self.connection += 1
        consumer.sink = self
        if self.process is None:
            self.process = SinkProcess(
                config=consumer.app.config,
                name=consumer.hostname,
                redis=consumer.app.redis,
                publish=self._publish,
                acknowledge=self._acknowledge,
                settle_s=consumer.app.timing.settle_s,
                open_store=self.open_store,
            )
            self.process.start()
        # Ends with the connection, like every timer begun while connecting.
        consumer.timer.call_repeatedly(consumer.app.timing.renew_s, self._acknowledge_settled)
        # `worker_prefetch_multiplier` is no way: the command line has read it by the time it is
        # known that this process is a sink.
        consumer.initial_prefetch_count = PREFETCH
        consumer.qos.set(PREFETCH)
        consumer.qos.value = PREFETCH
        consume_while(consumer.task_consumer.channel, self._takes_more)

    def stop(self, consumer: Any) -> None:
        """The connection is lost, or the process ends: what is not committed is delivered again."""
        if self.process is None:
            return  # the connection was lost before the sink was begun
        if consumer.blueprint.state == bootsteps.RUN:
            self.connection += 1
            self.process.batcher.drop()
            return
        # A commit that is under way may end in this time; cut off, it is made again by whoever is next.
        self.process.stop(consumer.app.timing.drain_s)
        self._acknowledge_settled()

    terminate = stop

    def receive(self, message: Any) -> None:
        """Hold one result; what is none for this store is set aside and acknowledged."""
        assert self.process is not None
        if not self.process.serves:
            message.reject_log_error(logger, self._consumer.connection_errors, requeue=True)
            return
        body = b""
        try:
            (body,), *_ = message.payload
            result = decode(body)
            if not isinstance(result, Result):
                raise MessageError(f"`{type(result).__name__}` is no result", code="message.type")
            if not self.process.concerns(result.run):
                raise MessageError(f"a result of run `{result.run}`", code="message.run")
        # The edge where foreign bytes enter: anything may be in them, and Celery would stop.
        except Exception as error:
            self.process.set_aside(bytes(body or message.body or b""), str(error))
            message.ack_log_error(logger, self._consumer.connection_errors)
            return
        delivery = Delivery(message=message, connection=self.connection, said=summary(result))
        self._send(
            "task-received", delivery, args=delivery.said, kwargs="", retries=0, eta=None, expires=None
        )
        self.process.batcher.add(Held(result=result, message_bytes=len(message.body), delivery=delivery))

    def _takes_more(self) -> bool:
        return self.process is not None and self.process.takes_more

    def _publish(self, messages: Sequence[Message]) -> object:
        assert self.process is not None
        return publish_many(self._consumer.app, messages, self.process.stopping)

    def _acknowledge(self, batch: Sequence[Held]) -> None:
        """Called by the thread that commits; done by the thread that owns the connection."""
        self._settled.extend(held.delivery for held in batch)
        self._consumer.call_soon(self._acknowledge_settled)

    def _acknowledge_settled(self) -> None:
        for _ in range(len(self._settled)):
            delivery = self._settled.popleft()
            if delivery.connection == self.connection:
                delivery.message.ack_log_error(logger, self._consumer.connection_errors)
                if not delivery.message.acknowledged:
                    # Celery tries once. Held on, its lease would be renewed for as long as this
                    # process lives, and the queues would never count as empty.
                    self._settled.append(delivery)
                    continue
            state.all_total_count[0] += 1
            took_s = time.monotonic() - delivery.received
            self._send("task-succeeded", delivery, result="stored", runtime=took_s)

    def _send(self, event: str, delivery: Delivery, **fields: Any) -> None:
        """For Flower: these tasks never run, so Celery says nothing of them."""
        events = self._consumer.event_dispatcher
        if events is not None and events.enabled:
            events.send(event, uuid=delivery.task_id, name=delivery.message.headers.get("task"), **fields)


def collect(task: Any, app: Any, consumer: Any) -> Callable[..., None]:
    """The strategy of the task of results: `Strategy = "workers.sink.step:collect"`."""

    def receive(message: Any, *_: Any, **__: Any) -> None:
        consumer.sink.receive(message)

    return receive
