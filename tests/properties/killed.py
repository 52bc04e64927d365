"""Runs a piece of work in a forked process that is killed, for real, just before one of its steps.

A step is whatever changes or opens something in the file system: Python tells its audit hooks of
each, and of `fsync` and `write` a wrapper does. So every boundary between two system calls can be
hit, with nothing in the code under test knowing of it.
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

STEPS = frozenset(
    ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.utime", "os.truncate")
)


@dataclass(frozen=True)
class KillAt:
    """When to die."""

    step: int | None = None
    """Before this step, from 1."""
    commit: int | None = None
    """At this rename out of or into the staging folder, from 1."""
    after: bool = False
    """At the first step after that rename rather than before it."""


def killed(work: Callable[[], None], at: KillAt) -> bool:
    """Whether the work ended before it was killed; raises `AssertionError` when it failed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(60)  # a hang ends as a failure
            _arm(at)
            work()
            status = 0
        except BaseException as error:
            sys.stderr.write(f"killed: {error!r}\n")
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL), f"the work failed: {ended}"
    return ended == 0


def _arm(at: KillAt) -> None:
    state = {"steps": 0, "commits": 0, "next": False}

    def step(name: str, args: tuple[object, ...]) -> None:
        state["steps"] += 1
        if state["next"] or state["steps"] == at.step:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "os.rename" and ".staging" in f"{args[0]} {args[1]}":
            state["commits"] += 1
            if state["commits"] == at.commit:
                if not at.after:
                    os.kill(os.getpid(), signal.SIGKILL)
                state["next"] = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event in STEPS:
            step(event, args)

    sys.addaudithook(hook)
    for name in ("fsync", "write"):
        setattr(os, name, _told(getattr(os, name), name, step))


def _told(call: Callable, name: str, step: Callable) -> Callable:
    def told(*args):
        step(name, args)
        return call(*args)

    return told
