"""The lanes a manifest may ask for.

Which lane a prompt of an `auto` dataset takes is decided where it is queued (`workers/feeder/orders.py`).
"""

from enum import StrEnum


class DatasetLane(StrEnum):
    """Where a dataset's prompts go."""

    SHORT = "short"
    LONG = "long"
    AUTO = "auto"
    """Long above 4 096 prompt tokens, else short."""
    CAPTURE = "capture"
    """Already tokenized: nothing is generated."""
