"""The Celery app: `celery -A workers worker | flower | inspect …` finds it here.

What it is set to is in `celeryconfig.py`; which task a process has, in `worker.py`. Programs that
only publish make their own with `create_app`.
"""

import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from celery import Celery
from redis import Redis

from storage.cli_errors import print_error
from storage.errors import EyasError
from workers.broker.celeryconfig import Timing, load_timing, settings
from workers.broker.connection import connect
from workers.broker.garbage import refuse_compressed
from workers.broker.lease import Lease
from workers.broker.publish import Outage
from workers.config import Config, load_config


class EyasApp(Celery):  # type: ignore[misc]
    """Celery with what one process of Eyas has besides."""

    config: Config
    timing: Timing
    lane: Any = None
    """The `Lane` of a lane process; None in a sink and in programs that only publish."""

    @cached_property
    def redis(self) -> Redis:
        """For everything that is not Celery's."""
        return connect(self.config.redis_url)

    @cached_property
    def lease(self) -> Lease:
        """Of the messages this process holds."""
        return Lease(self.redis, self.timing.renew_s)

    @cached_property
    def outage(self) -> Outage:
        """Whether this process waits to publish."""
        return Outage()

    @cached_property
    def carried(self) -> Any:
        """What a lane process holds, over all its connections."""
        from workers.broker.carrying import Carried
        from workers.broker.consuming import names

        return Carried(self.lane.flight, names)

    @cached_property
    def Worker(self) -> Any:  # noqa: N802
        """The worker program, which Celery asks its app for."""
        return self.subclass_with_self("workers.broker.worker:Worker")


def create_app(config: Config, timing: Timing | None = None) -> EyasApp:
    """An app on the Redis of this configuration; nothing is connected yet."""
    refuse_compressed()
    app = EyasApp("eyas", set_as_current=False)
    app.config, app.timing = config, timing or load_timing()
    app.conf.update(settings(config.redis_url, app.timing))
    app.steps["worker"].add("workers.broker.worker:EndStep")
    app.steps["consumer"].add("workers.broker.consuming:AdmissionStep")
    return app


def __getattr__(name: str) -> Any:
    """`app`, made when it is asked for: a setting that cannot be used is then its command's error."""
    if name != "app":
        raise AttributeError(name)
    try:
        app = globals()["app"] = create_app(load_config())
    except EyasError as error:
        program = Path(sys.argv[0])
        if program.name != "celery" and program.parts[-2:] != ("celery", "__main__.py"):
            raise
        # Celery would print three tracebacks before it.
        raise SystemExit(print_error(error)) from None
    app.set_current()
    if _is_for_flower():
        from workers.flower.extension import extend

        extend(app.config.redis_url)
    return app


def _is_for_flower() -> bool:
    """Whether `celery … flower` asks for the app: it loads the app before it starts Flower."""
    context = click.get_current_context(silent=True)
    return context is not None and context.invoked_subcommand == "flower"
