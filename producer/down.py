"""`producer down`: stops all that `up` started here, also when its supervisor is no longer there to do it."""

import click

from producer.machine.processes import of_folder
from producer.machine.take_down import take_down
from producer.machine.up_state import StateFolder
from producer.talk import say
from workers.config import state_dir


@click.command("down")
def command() -> int:
    """Stop everything that `producer up` started on this machine.

    Calls in flight go back into the queue; Redis' data stays, and the next `up` goes on with it.
    """
    folder = StateFolder(state_dir())
    if not folder.path.is_dir() and not of_folder(folder.path):
        say("nothing is up")
        return 0
    folder.create()
    with folder.alone("down", lambda other: say(f"waiting for {other} to end")):
        state = folder.read_state()
        if state is not None and state.is_running():
            say(f"stopping {', '.join(state.processes)}")
        say("all stopped" if take_down(folder) else "nothing is up")
    return 0
