"""The program `celery -A workers worker`: Celery's worker, told what it is by its `-Q`.

A process serves one lane or is a sink. Settings that depend on which are made here; what a lane
does is in `workers/lane/`, what a sink does in `workers/sink/`.
"""

import logging
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from celery import bootsteps
from celery.apps.worker import Worker as CeleryWorker
from celery.concurrency.thread import TaskPool
from celery.exceptions import CPendingDeprecationWarning

from storage.errors import EyasError, UsageError
from workers.broker.connection import connect
from workers.broker.drain import Drain
from workers.broker.queues import DEFAULT_CONCURRENCY, role_of, sink_queue
from workers.lane.lane import Lane
from workers.lane.tasks import register_lane, register_store


class NoWork:
    """A sink, as far as `drain.py` is concerned: what it holds is given back when it stops."""

    def drain(self) -> None:
        """The sink stops taking results when Celery stops."""

    def cancel(self) -> int:
        """Nothing runs in the pool."""
        return 0


class Worker(CeleryWorker):  # type: ignore[misc]
    """One lane process, or one sink."""

    def on_before_init(self, **options: Any) -> None:
        """Learn from `-Q` what this process is, before Celery reads the settings."""
        # Said at each reconnect, of a setting that `celeryconfig.py` made on purpose.
        warnings.simplefilter("ignore", CPendingDeprecationWarning)
        super().on_before_init(**options)
        try:
            self.lane = role_of(_listed(options.get("queues")))
            self._check(options)
        except UsageError as error:
            _refuse(error)
        conf = self.app.conf
        if self.lane is None:
            register_store(self.app)
            # Added here and not with the app's other steps: it brings Zarr, which no lane needs.
            self.app.steps["consumer"].add("workers.sink.step:SinkStep")
            conf.worker_concurrency = 1
        else:
            register_lane(self.app, self.lane)
            conf.worker_concurrency = DEFAULT_CONCURRENCY[self.lane]

    def prepare_args(self, **options: Any) -> dict[str, Any]:
        """Leave out what asks the other workers: it takes a second at each start and reconnect."""
        args: dict[str, Any] = super().prepare_args(**options)
        return args | {"without_mingle": True, "without_gossip": True}

    def on_init_blueprint(self) -> None:
        """Keep the log at one line per change of a run or a server: Celery writes two an order."""
        super().on_init_blueprint()
        for name in ("workers", "storage"):
            logging.getLogger(name).setLevel(logging.INFO)
        for name in ("celery.worker.strategy", "celery.app.trace", "httpx"):
            logging.getLogger(name).setLevel(logging.WARNING)
        # An order that goes back to its queue is no error; why it does is said once, by the lane.
        logging.getLogger("celery.app.trace").addFilter(_is_no_rejection)

    def on_start(self) -> None:
        """Begin the lane, or take the node's own results too."""
        try:
            if self.lane is not None:
                self.app.lane = Lane(
                    self.lane,
                    name=self.hostname,
                    capacity=self.concurrency,
                    config=self.app.config,
                    timing=self.app.timing,
                )
                self.app.lane.start()
            else:
                connect(self.app.config.redis_url).close()  # Celery would try a wrong URL for ever
                self.app.amqp.queues.select_add(sink_queue(self.app.config.node))
        except EyasError as error:
            _refuse(error)
        super().on_start()

    def install_platform_tweaks(self, worker: Any) -> None:
        """Take over the signals by which a process is ended."""
        super().install_platform_tweaks(worker)
        timing = self.app.timing
        self.drain = Drain(
            self.app.lane or NoWork(),
            # A sink gives back what it holds itself.
            held=(lambda: len(self.app.lease.held())) if self.lane is not None else (lambda: 0),
            wake=self._wake,
            grace_s=timing.drain_s,
            exit_s=timing.exit_s,
        )
        self.drain.install()

    def on_stopped(self) -> None:
        """Leave the board."""
        super().on_stopped()
        if self.app.lane is not None:
            self.app.lane.close()

    def _wake(self) -> None:
        hub = getattr(self, "hub", None)
        if hub is not None:
            hub.call_soon(lambda: None)

    def _check(self, options: dict[str, Any]) -> None:
        pool = options.get("pool_cls") or options.get("pool")
        if pool not in (None, "threads", TaskPool):
            raise UsageError(
                f"`-P {pool}`: calls are made from threads around one event loop",
                code="worker.pool",
                hint="use `-P threads`, or leave it out",
            )
        if self.lane is None and options.get("concurrency") not in (None, 0, 1):
            raise UsageError(
                f"`-c {options['concurrency']}`: a sink has one writer",
                code="worker.concurrency",
                hint="use `-c 1`, or leave it out",
            )


class EndStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Ends what runs before Celery waits for it, however the process was told to end."""

    name = "End"
    requires = ("celery.worker.components:Pool",)

    def stop(self, worker: Any) -> None:
        """The worker stops: this step before the pool."""
        drain: Drain | None = getattr(worker, "drain", None)
        if drain is not None and drain.finish_now() and worker.hub is not None:
            # Celery's loop does not run any more; what it was to acknowledge is done here.
            for callback in worker.hub._pop_ready():
                callback()

    terminate = stop


def _listed(queues: Any) -> list[str]:
    if isinstance(queues, str):
        queues = queues.split(",")
    return [name for name in (str(q).strip() for q in queues or ()) if name]


def _refuse(error: EyasError) -> None:
    hint = f"\n\nhint: {error.hint}" if error.hint else ""
    sys.stderr.write(f"error: {error.message}{hint}\n")
    raise SystemExit(error.exit_status) from None


def _is_no_rejection(record: logging.LogRecord) -> bool:
    return not (isinstance(record.args, Mapping) and record.args.get("description") == "rejected")
