"""The lanes: those there are, and what a manifest may ask for.

Which lane a prompt of an `auto` dataset takes is decided where it is queued (`workers/feeder/orders.py`).
"""

from enum import StrEnum

from workers.broker.queues import Lane

LANES = tuple(lane.value for lane in Lane)
"""Names of the lanes, each with its limit, its flags and its process."""


class DatasetLane(StrEnum):
    """Where a dataset's prompts go."""

    SHORT = "short"
    LONG = "long"
    AUTO = "auto"
    """Long above 4 096 prompt tokens, else short."""
    CAPTURE = "capture"
    """Already tokenized: nothing is generated."""
