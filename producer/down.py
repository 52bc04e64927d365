"""`producer down`: stops all that `up` started here, also when its supervisor is no longer there to do it."""

import click

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
    state = folder.read_state()
    if state is not None and state.is_running():
        say(f"stopping {', '.join(state.processes)}")
    if take_down(folder):
        say("all stopped")
    else:
        say("nothing is up")
    return 0
