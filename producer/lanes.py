"""Lanes: which queue a prompt goes to.

The feeder, which queues, asks the same rule (`workers/feeder.py`); here it serves the manifest and
the plan.
"""

from enum import StrEnum

AUTO_LONG_ABOVE = 4096
"""Prompt tokens above which `auto` means `long`."""


class Lane(StrEnum):
    """What a dataset may ask for."""

    SHORT = "short"
    LONG = "long"
    AUTO = "auto"
    CAPTURE = "capture"


def lane_of(lane: Lane, prompt_tokens: int) -> Lane:
    """The lane of one prompt of a dataset with this `lane`."""
    if lane is not Lane.AUTO:
        return lane
    return Lane.LONG if prompt_tokens > AUTO_LONG_ABOVE else Lane.SHORT
