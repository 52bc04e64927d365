"""The steps of a sink between which it can be killed, in order."""

STEPS = (
    "before states",
    "after states",
    "before responses",
    "after responses",
    "after failures",
    "before acknowledging",
    "half acknowledged",
    "after acknowledging",
)
