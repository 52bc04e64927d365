"""The tasks: thin, and the outermost edge of an order. Nothing is raised out of one but `Reject`.

With late acknowledgement Celery acknowledges a task that raises, which would lose the order. So
here every error ends in one of three ways:

    done with         a result was published, or nobody wants it: acknowledged
    back to the queue server away, spool full, slots lowered, process stopping: not counted
    dead letter       an error of our own, `ATTEMPTS` times: code `worker.error`
"""

import concurrent.futures
import logging
from typing import Any

from celery.exceptions import Reject

from storage.errors import FullError
from workers.broker.messages import (
    Capture,
    Captured,
    Failed,
    Generate,
    MessageError,
    Responded,
    Result,
    decode,
)
from workers.broker.publish import order_key, publish
from workers.broker.queues import STORE_TASK, task_of
from workers.broker.queues import Lane as LaneName
from workers.celery import EyasApp
from workers.lane.alone import NotAloneError
from workers.lane.lane import Lane
from workers.lane.marks import Mark
from workers.runs import RunView
from workers.sglang.execute import dead_letter
from workers.sglang.outcomes import AGAIN, ATTEMPTS, ServerAwayError, StaleOrderError
from workers.stopping import StoppedError

logger = logging.getLogger(__name__)


class BackToQueueError(Exception):
    """The order cannot be run here and now; another process, or this one later, will."""


def register_lane(app: EyasApp, lane: LaneName) -> None:
    """The one task of a lane process."""

    @app.task(name=task_of(lane), bind=True, typing=False)  # type: ignore[untyped-decorator]
    def order(self: Any, body: bytes) -> str:
        return perform(app, self.app.lane, body, key=self.request.id, publication=self.request.correlation_id)


def register_store(app: EyasApp) -> None:
    """The one task of a sink; its strategy takes the messages, so its body is never run."""

    @app.task(  # type: ignore[untyped-decorator]
        name=STORE_TASK, typing=False, Strategy="workers.sink.step:collect"
    )
    def store(body: bytes) -> None:
        raise AssertionError("results are collected by the strategy")


def perform(app: EyasApp, lane: Lane, body: bytes, *, key: str, publication: str) -> str:
    """Run one order to its end; what Flower shows of it.

    Raises `Reject` to give the order back, and nothing else.
    """
    settled = False
    try:
        said = _perform(app, lane, body)
        settled = True
        return said
    except BackToQueueError as error:
        lane.count("requeued")
        raise Reject(str(error), requeue=True) from None
    # The outermost edge: only a fault in these few files comes here. It may come again with the
    # order, which must not go round as fast as Redis can.
    except Exception as error:
        logger.exception("order.failed key=%s", key)
        lane.stopping.wait(AGAIN.longest_s)
        raise Reject(repr(error), requeue=True) from None
    finally:
        lane.flight.finish(key, publication, published=settled)


def _perform(app: EyasApp, lane: Lane, body: bytes) -> str:
    try:
        order = decode(body)
        if not isinstance(order, Generate | Capture):
            raise MessageError(f"`{type(order).__name__}` is no order", code="message.type")
    except MessageError as error:
        lane.set_aside(body, error.message)
        return f"set aside: {error.message}"
    view = lane.view
    if view is None:
        raise BackToQueueError("no run")
    unwanted = _unwanted(order, view)
    if unwanted:
        # The order may be younger than the view: of a run that has just begun, of a dataset whose
        # cap was raised. Dropping it would cost the run the time until the feeder misses it.
        now = lane.view_now()
        if now is None or not _unwanted(order, now):
            lane.stopping.wait(lane.timing.pulse_s)
            raise BackToQueueError("the order is younger than the view")
        return _drop(lane, unwanted)
    try:
        result = _call(lane, order, view)
    except StaleOrderError as error:
        return _drop(lane, error.message)
    try:
        publish(app, result, lane.stopping)
    except StoppedError:
        raise BackToQueueError("stopping, and Redis is away") from None
    lane.marks.clear(order_key(order))
    _count(lane, result)
    return outcome_text(result)


def _call(lane: Lane, order: Generate | Capture, view: RunView) -> Result:
    """The order's result, from the server with the most free slots; of a suspect, from one apart."""
    key = order_key(order)
    mark = lane.marks.read(key)
    if mark.suspect:
        mark = lane.marks.with_company(key, mark)
        try:
            with lane.apart.place(mark) as url:
                return _call_at(url, lane, order, view, key, mark)
        except NotAloneError as error:
            raise BackToQueueError(str(error)) from None
    taken = lane.calls.take()
    if taken is None:
        lane.apart.met_another()
        raise BackToQueueError("no free slot")
    try:
        return _call_at(taken, lane, order, view, key, mark)
    finally:
        lane.calls.give_back(taken)


def _call_at(url: str, lane: Lane, order: Generate | Capture, view: RunView, key: str, mark: Mark) -> Result:
    failures = 0
    while True:
        try:
            return lane.run(order, url, view)
        except ServerAwayError as error:
            lane.calls.lost(url)
            if error.in_flight:
                # Before the order goes back: whoever takes it next must know.
                mark = lane.marks.died(key, mark, url)
            if mark.guilty:
                said = f"the only call in flight at {url} when it went: {error.message}"
                return dead_letter(order, code="prompt.kills_server", said=said, attempts=mark.deaths)
            raise BackToQueueError(error.code) from None
        except FullError as error:
            lane.pause.begin(error.message)
            raise BackToQueueError(error.code) from None
        except OSError as error:
            # A spool folder that is gone, too many open files: the machine, not the sample.
            lane.pause.begin(f"this machine: {error}")
            raise BackToQueueError("worker.machine") from None
        except concurrent.futures.CancelledError:
            raise BackToQueueError("stopping") from None
        except StaleOrderError:
            raise
        # An edge: a fault of ours in one order must neither lose it nor stop the others.
        except Exception as error:
            failures += 1
            logger.exception("order.error id=%s failures=%d", order.id.hex(), failures)
            if failures >= ATTEMPTS:
                return dead_letter(order, code="worker.error", said=repr(error), attempts=failures)
            if lane.stopping.wait(AGAIN.pause_s(failures)):
                raise BackToQueueError("stopping") from None


def _unwanted(order: Generate | Capture, view: RunView) -> str:
    """Why nobody wants the order's result; empty when somebody does."""
    if order.run != view.run.id:
        return "another run's"
    if isinstance(order, Generate) and order.dataset in view.closed:
        return "dataset closed"
    return ""


def _drop(lane: Lane, why: str) -> str:
    lane.count("dropped")
    return why


def _count(lane: Lane, result: Result) -> None:
    match result:
        case Responded(response=response):
            lane.count("done")
            lane.count("again", response.attempt - 1)
            lane.count("tokens", len(response.tokens) - response.prompt_length)
            lane.count("prompt_tokens", response.prompt_length)
        case Captured(states=states):
            lane.count("done")
            lane.count("tokens", states.spool.shape[0])
        case Failed(failure=failure):
            lane.count("failed")
            lane.count("again", max(0, failure.attempts - 1))


def outcome_text(result: Result) -> str:
    """The result in a few words, as Flower shows it: `1480 tok · 61 tok/s · stop`."""
    match result:
        case Responded(response=response):
            tokens = len(response.tokens) - response.prompt_length
            seconds = response.timings.e2e_s
            speed = f"{tokens / seconds:.0f} tok/s · " if seconds > 0 else ""
            return f"{tokens} tok · {speed}{response.finish}"
        case Captured(states=states):
            t, layers, _ = states.spool.shape
            return f"{t} rows × {layers} layers · {_size(states.spool.size_bytes)}"
        case Failed(failure=failure):
            return f"dead letter · {failure.code}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} kB"
