"""The process behind `producer up`: starts what the plan names, restarts what dies, stops all when told.

`python -m producer.machine.supervisor FOLDER`, in a session of its own, so that no terminal takes it
along. It decides nothing about what runs (`services.py` does) and prints nothing but its log. SIGTERM:
stop everything. SIGUSR1: the plan has more services, start them.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from socket import gethostname
from types import FrameType

from producer.machine.children import Child, ended, how_it_ended, start
from producer.machine.processes import MARK, identity, is_alive, kill_group, marked, send
from producer.machine.ready import is_ready
from producer.machine.up_state import Plan, ServiceReport, StateFolder, UpState
from storage.errors import DamagedError
from workers.config import default_spool_dir, load_grace_s

TICK_S = 0.25
"""Between two looks at what is not ready yet."""
FIRST_DELAY_S = 0.2
"""Before the first restart; doubled for each further one."""
LONGEST_DELAY_S = 10.0
"""A restarted lane must take up work again within 60 s, its start included."""
HEALTHY_AFTER_S = 15.0
"""A service that ran so long begins at the first delay again."""
DEATHS_AT_START = 5
"""So many times a service is killed before it was ever ready (out of memory, a crash in its code) until
it has failed to start; `up` would wait for ever."""
READY_WITHIN_S = 120.0
"""After this a service that is not ready has failed to start."""
GRACE_S = 10.0
"""What SIGTERM gets before SIGKILL, in each stage of stopping but the first: engine, Redis."""
WORKERS_MORE_S = 5.0
"""In the first, lanes and sink end by themselves within their own grace; then so much later."""


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Everything that one `up` runs."""

    folder: StateFolder
    plan: Plan
    state: UpState
    children: dict[str, Child] = field(default_factory=dict)
    grace_s: float = field(default_factory=load_grace_s)
    """The workers' own."""
    stopping: bool = False
    reload: bool = False
    wakes: int = -1
    """A pipe that every signal makes readable, so that no death waits for the tick."""

    def run(self) -> int:
        """Runs until told to stop; the exit status is 1 when a first start failed."""
        self._listen()
        self._add_services()
        try:
            while not self.stopping and self.state.phase != "failed":
                self._reap()
                self._start_due()
                self._look()
                self._settle()
                self._wait()
                self.stopping = self.stopping or self._owner_is_gone()
                if self.reload:
                    self.reload = False
                    self._reload()
        finally:
            self._stop_all()
        return 1 if self.state.phase == "failed" else 0

    def _reload(self) -> None:
        try:
            self.plan = self.folder.read_plan()
        except DamagedError as error:
            _log("plan not read", error=error.message)
        else:
            self._add_services()

    def _listen(self) -> None:
        def stop(number: int, frame: FrameType | None) -> None:
            self.stopping = True

        def reload(number: int, frame: FrameType | None) -> None:
            self.reload = True

        def wake(number: int, frame: FrameType | None) -> None:
            pass

        self.wakes, writing = os.pipe()
        os.set_blocking(self.wakes, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGUSR1, reload)
        signal.signal(signal.SIGCHLD, wake)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _add_services(self) -> None:
        for service in self.plan.services:
            known = self.children.get(service.name)
            if known is None or known.report.state == "failed":
                report = ServiceReport(log=str(self.folder.log(service.name)), address=service.address)
                self.children[service.name] = Child(service=service, report=report)
                self.state.processes[service.name] = report
        self.state.plan_number = self.plan.number
        self.state.redis_url = self.plan.redis_url
        self.state.engine_url = self.plan.engine_url
        self.state.flower_url = self.plan.flower_url
        self.state.flower_login = self.plan.flower_login
        self.state.output_dir = self.plan.output_dir
        self.state.spool_dir = self.plan.spool_dir
        if self.state.phase == "up":
            self.state.phase = "starting"
        self._write()

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self.children.values():
            ready = {n for n, c in self.children.items() if c.was_ready}
            needed = {name for name in child.service.after if name in self.children}
            idle = child.process is None and child.report.state != "failed"
            if idle and now >= child.start_at and needed <= ready:
                self._start(child)

    def _start(self, child: Child) -> None:
        name = child.service.name
        environment = {**os.environ, MARK: self.state.token, "PYTHONUNBUFFERED": "1"}
        child.started_at = time.monotonic()
        try:
            child.process = start(child.service, environment, self.folder.path, self.folder.log(name))
        except OSError as error:  # no memory, no process left, no such program, a full disk
            self._died(child, 1, f"could not be started: {error}")
            return
        report = child.report
        report.pid = child.process.pid
        found = identity(child.process.pid)
        report.started = found.started if found else None
        report.state = "restarting" if child.was_ready else "starting"
        report.ready_s = None
        self._write()
        _log("started", service=name, pid=child.process.pid, restarts=report.restarts)

    def _reap(self) -> None:
        for child in self.children.values():
            if child.process is not None and (status := ended(child.process)) is not None:
                child.process = None
                self._died(child, status)

    def _died(self, child: Child, status: int, said: str | None = None) -> None:
        report = child.report
        if report.state == "failed":
            return
        lived_s = time.monotonic() - child.started_at
        report.said = said or how_it_ended(status)
        _log("died", service=child.service.name, how=report.said, lived_s=round(lived_s, 1))
        child.deaths = 1 if lived_s > HEALTHY_AFTER_S else child.deaths + 1
        if not child.was_ready and (status >= 0 or child.deaths >= DEATHS_AT_START):
            self._failed(child, f"{report.said} before it was ready")
            return
        # Bounded: after a night of deaths it would be a number that no float holds.
        delay_s = min(FIRST_DELAY_S * 2 ** min(child.deaths - 1, 30), LONGEST_DELAY_S)
        child.start_at = time.monotonic() + delay_s
        report.restarts += 1
        report.state = "restarting"
        self._write()

    def _look(self) -> None:
        for child in self.children.values():
            if child.process is None or child.report.state == "ready":
                continue
            age_s = time.monotonic() - child.started_at
            if is_ready(child.service, child.process.pid, self.plan.redis_url):
                child.was_ready = True
                child.report.state, child.report.said, child.report.ready_s = "ready", "", round(age_s, 2)
                self._write()
                _log("ready", service=child.service.name, after_s=child.report.ready_s)
            elif age_s > READY_WITHIN_S:
                if child.was_ready:
                    kill_group(child.process.pid)  # hung on its way back: once more
                else:
                    self._failed(child, f"was not ready within {READY_WITHIN_S:.0f} s")

    def _failed(self, child: Child, why: str) -> None:
        child.report.state = "failed"
        child.report.said = why
        if (
            any(other.was_ready for other in self.children.values() if other is not child)
            and self.state.up_once
        ):
            # an addition to what already runs: leave that alone
            if child.process is not None:
                kill_group(child.process.pid)
            self._write()
            return
        self.state.phase = "failed"
        self.state.error = f"{child.service.name} {why}"
        self._write()

    def _settle(self) -> None:
        if self.state.phase == "starting" and all(
            child.was_ready or child.report.state == "failed" for child in self.children.values()
        ):
            self.state.phase = "up"
            self.state.up_once = True
            self._write()
            _log("up", services=len(self.children))

    def _wait(self) -> None:
        waiting = any(c.process is None or c.report.state != "ready" for c in self.children.values())
        self._sleep(TICK_S if waiting else 1.0)

    def _owner_is_gone(self) -> bool:
        return self.plan.owner is not None and not is_alive(self.plan.owner)

    def _stop_all(self) -> None:
        """Stops stage by stage, what calls before what is called, so that calls go back to a living queue."""
        failed = self.state.phase == "failed"
        self.state.phase = "failed" if failed else "stopping"
        self._write()
        for stage, grace_s in enumerate((self.grace_s + WORKERS_MORE_S, GRACE_S, GRACE_S)):
            self._stop([c for c in self.children.values() if c.service.stops == stage], grace_s)
        # whatever left its session: found by the mark that children inherit
        for pid in marked(self.state.token):
            send(pid, signal.SIGKILL)
        if self.plan.owns_spool:
            rmtree(self.plan.spool_dir, ignore_errors=True)
        elif Path(self.plan.spool_dir) == default_spool_dir():
            with suppress(OSError):  # what is in it waits for a sink
                Path(self.plan.spool_dir).rmdir()
        if failed:
            # `up` reads the error and removes the file; without addresses nobody is sent to what is gone
            self.state.redis_url = self.state.engine_url = self.state.flower_url = None
            self._write()
        else:
            self.folder.forget()
        _log("stopped")
        if self._owner_is_gone():
            # nobody is left to remove what was made for the owner alone
            rmtree(self.folder.path, ignore_errors=True)

    def _stop(self, children: list[Child], grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for child in children:
            if child.process is not None:
                send(child.process.pid, signal.SIGTERM)
        while any(child.process is not None for child in children):
            for child in children:
                if child.process is not None and ended(child.process) is not None:
                    child.process = None
                    child.report.state = "stopped"
                    self._write()
                elif child.process is not None and time.monotonic() > deadline:
                    _log("killed", service=child.service.name, grace_s=grace_s)
                    kill_group(child.process.pid)
            self._sleep(0.05)

    def _sleep(self, longest_s: float) -> None:
        """Until a signal comes, or so long."""
        select.select([self.wakes], [], [], longest_s)
        with suppress(BlockingIOError):
            while os.read(self.wakes, 512):
                pass

    def _write(self) -> None:
        try:
            self.folder.write_state(self.state)
        except OSError as error:
            # a full disk must not end what keeps everything running; the next change tries again
            _log("state not written", error=error)


def _log(event: str, **facts: object) -> None:
    with suppress(OSError):  # the log's disk may be full
        moment = time.strftime("%Y-%m-%dT%H:%M:%S")
        print(moment, event, *(f"{k}={v}" for k, v in facts.items()), file=sys.stderr, flush=True)  # noqa: T201


def main() -> int:
    """Supervises the folder's plan; gives way when another supervisor has the folder."""
    folder = StateFolder(Path(sys.argv[1]))
    folder.create()
    if folder.lock() is None:
        _log("another supervisor has this folder")
        return 3
    myself = identity(os.getpid())
    assert myself is not None
    state = UpState(token=os.environ.pop(MARK), pid=myself.pid, started=myself.started, host=gethostname())
    return Supervisor(folder=folder, plan=folder.read_plan(), state=state).run()


if __name__ == "__main__":
    sys.exit(main())
