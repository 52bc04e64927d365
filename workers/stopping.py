"""The error by which a process that is told to end leaves what would wait."""


class StoppedError(Exception):
    """The process ends; what was not done is left to whoever comes next."""
