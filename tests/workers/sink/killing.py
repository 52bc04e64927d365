"""A sink that kills its own process at a chosen step: `EYAS_TEST_KILL_AT=<step>:<nth time>`; with `:hang`
behind that it stands still there, as on a disk that does not answer.

The real app with its own `Store` and acknowledgement wrapped; started by `celery -A
tests.workers.sink.killing`. Without the variable it is the real sink, only quicker to redeliver.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from storage.store import Store
from workers.broker.worker import Worker
from workers.celery import app
from workers.sink.batching import Held
from workers.sink.step import SinkStep

_step, _times, _how, *_ = (*os.environ.get("EYAS_TEST_KILL_AT", "").split(":"), "", "")
_left = int(_times or 0)


def _pass(step: str) -> None:
    global _left
    if step == _step:
        _left -= 1
        if _left == 0 and _how == "hang":
            sys.stdout.write("hanging\n")
            sys.stdout.flush()
            threading.Event().wait()
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class MortalStore(Store):
    def commit_states(self, batch, spool):
        _pass("before states")
        done = super().commit_states(batch, spool)
        _pass("after states")
        return done

    def commit_responses(self, batch):
        _pass("before responses")
        done = super().commit_responses(batch)
        _pass("after responses")
        return done

    def commit_failures(self, batch):
        done = super().commit_failures(batch)
        _pass("after failures")
        return done


class MortalStep(SinkStep):
    def open_store(self, path: Path) -> Store:
        return MortalStore.open(path)

    def _acknowledge(self, batch: Sequence[Held]) -> None:
        _pass("before acknowledging")
        super()._acknowledge(batch)

    def _acknowledge_settled(self) -> None:
        settled = list(self._settled)
        if len(settled) > 1 and _step == "half acknowledged":
            self._settled.clear()
            self._settled.extend(settled[: len(settled) // 2])
            super()._acknowledge_settled()
            _pass("half acknowledged")
        super()._acknowledge_settled()
        if settled:
            _pass("after acknowledging")


class MortalWorker(Worker):
    def on_before_init(self, **options):
        super().on_before_init(**options)
        self.app.steps["consumer"].discard("workers.sink.step:SinkStep")
        self.app.steps["consumer"].add(MortalStep)


app.Worker = app.subclass_with_self(MortalWorker)
