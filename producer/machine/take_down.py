"""What `up` started taken down: by its supervisor, or, where that is gone, in its place."""

import signal
import time

from producer.machine.processes import end_all, identity, is_alive, is_supervisor, of_folder, send
from producer.machine.up_state import StateFolder, UpState
from producer.talk import say
from storage.errors import UnavailableError
from workers.config import load_grace_s

LOOK_S = 0.05
SUPERVISOR_S = 50.0
"""More than the supervisor's own graces but the workers'; after both everything is killed."""
SAY_S = 3.0
ORPHANS_S = 20.0
"""What processes without a supervisor get to end by themselves."""


def take_down(folder: StateFolder) -> bool:
    """Stops everything that runs; whether anything did.

    Raises `UnavailableError` when it was started on another machine that shares this folder.
    """
    state = folder.read_state()
    if state is None:
        return end_strays(folder)
    if not state.is_running():
        clean_up(folder, state)
        return True
    send(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + SUPERVISOR_S + load_grace_s()
    say_at = time.monotonic() + SAY_S
    while state.is_running():
        if time.monotonic() > say_at:
            say_at += SAY_S
            _say_what_still_runs(folder)
        if time.monotonic() > deadline:
            send(state.pid, signal.SIGKILL)
            clean_up(folder, folder.read_state() or state)
            break
        time.sleep(LOOK_S)
    return True


def end_strays(folder: StateFolder) -> bool:
    """Ends what some `up` started for this folder where its state file is gone; whether anything was.

    Through its supervisor if that is there, so that calls go back to a living queue.
    """
    strays = of_folder(folder.path)
    if not strays:
        return False
    count = sum(map(len, strays.values()))
    say(f"`{folder.path / 'up.json'}` is gone, but {count} processes it told of still run: stopping them")
    supervisors = [
        known for pids in strays.values() for pid in pids if is_supervisor(pid) and (known := identity(pid))
    ]
    for supervisor in supervisors:
        send(supervisor.pid, signal.SIGTERM)
    deadline = time.monotonic() + SUPERVISOR_S + load_grace_s()
    while any(map(is_alive, supervisors)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    for token in strays:
        end_all(token, (), ORPHANS_S)
    folder.forget()
    return True


def _say_what_still_runs(folder: StateFolder) -> None:
    state = folder.read_state()
    left = [n for n, r in state.processes.items() if r.state != "stopped"] if state else []
    if left:
        say(f"still stopping: {', '.join(left)}")


def clean_up(folder: StateFolder, state: UpState) -> None:
    """Ends what a supervisor that is gone has left running, and forgets it.

    Only processes that carry its mark, or are by pid and start the ones it recorded, are touched.
    """
    lock = folder.lock()
    if lock is None:
        raise UnavailableError(
            f"`{folder.path}` is in use on `{state.host}`",
            code="up.elsewhere",
            hint=f"run this on `{state.host}`, or give this machine its own folder with EYAS_STATE_DIR",
        )
    folder.release(lock)
    ended = end_all(state.token, state.recorded(), ORPHANS_S)
    if ended:
        say(f"the supervisor was gone; ended {len(ended)} processes it left running")
    folder.forget()
