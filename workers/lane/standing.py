"""What a lane process says of itself in two words and a sentence: `running`, or why it does nothing.

Only the choosing is here; who looks and who is told is in `lane.py`.
"""

from workers.lane.pause import Pause

BEFORE = ("waiting", "has not looked for its run yet")
"""Said until the first look."""


def standing(
    *, lane: str, name: str, draining: bool, twin: bool, has_run: bool, pause: Pause, limit: int, healthy: int
) -> tuple[str, str]:
    """State and reason, as `processes.ProcessSnapshot` has them. `healthy` counts servers."""
    if draining:
        return "stopping", "has been told to end"
    if twin:
        return "waiting", f"another process is called `{name}`: name one otherwise with `-n`"
    if not has_run:
        return "waiting", "there is no run yet: `producer enqueue` begins one"
    if pause.on:
        return "paused", pause.why
    if limit == 0:
        return "paused", f"the lane `{lane}` has a limit of 0"
    return ("running", "") if healthy else ("waiting", "no server takes calls")
