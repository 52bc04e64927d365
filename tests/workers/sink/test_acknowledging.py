"""The sink's side of a connection: what is committed is acknowledged, and it fails now and then."""

from types import SimpleNamespace
from typing import Any

from celery import bootsteps

from workers.sink.batching import Held
from workers.sink.step import Delivery, SinkStep


class Message:
    """As kombu's, whose acknowledgement fails so many times."""

    def __init__(self, failures: int) -> None:
        self.headers = {"id": "1", "task": "store"}
        self.acknowledged = False
        self._failures = failures

    def ack_log_error(self, logger: Any, errors: Any) -> None:
        self._failures -= 1
        self.acknowledged = self._failures < 0


def a_step() -> SinkStep:
    consumer = SimpleNamespace(
        event_dispatcher=None, connection_errors=(OSError,), call_soon=lambda call: call()
    )
    return SinkStep(consumer)


def settle(step: SinkStep, message: Message, connection: int) -> None:
    delivery = Delivery(message=message, connection=connection, said="")
    held: Any = None
    step._acknowledge([Held(result=held, message_bytes=1, delivery=delivery)])


def test_an_acknowledgement_that_failed_is_tried_again_with_the_next() -> None:
    step = a_step()
    failing, good = Message(failures=1), Message(failures=0)
    settle(step, failing, step.connection)
    assert not failing.acknowledged
    settle(step, good, step.connection)
    assert failing.acknowledged
    assert good.acknowledged


def test_a_delivery_of_an_earlier_connection_is_not_acknowledged_on_this_one() -> None:
    step = a_step()
    earlier = Message(failures=0)
    step.connection += 1
    settle(step, earlier, step.connection - 1)
    assert not earlier.acknowledged
    assert not step._settled


def test_a_connection_lost_before_the_sink_began_ends_nothing() -> None:
    step = a_step()
    step.stop(SimpleNamespace(blueprint=SimpleNamespace(state=bootsteps.RUN)))
    assert step.process is None
