"""The one tree of errors: a code that is never renamed, a message, a hint and an exit status.

A class exists only where a caller acts differently; everything else is a `code`. This file does
not print: the command lines do, as `error: …`, a blank line, `hint: …`.
"""

from typing import ClassVar


class EyasError(Exception):
    """Anything Eyas itself reports.

    `code` is stable and made for programs (`run.other`, `server.away`); `hint` says what to type.
    """

    exit_status: ClassVar[int] = 1
    """What a command ends with when this reaches its edge."""

    def __init__(self, message: str, *, code: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint


class UsageError(EyasError):
    """The command, the manifest or a settings file has to be changed by its author."""

    exit_status = 2


class UnavailableError(EyasError):
    """Something needed does not answer now and may come back: Redis, a server, a folder."""

    exit_status = 3


class UnsuitableError(EyasError):
    """Something needed answers but cannot be used as it is: another run, model or capability."""

    exit_status = 3


class RunReplacedError(UnsuitableError):
    """The folder holds another run than the one it was opened for: nothing may be added to it."""


class DamagedError(EyasError):
    """A committed file of the store does not say what it should: the caller must not use it."""


class SpoolLostError(EyasError):
    """A spool file is gone or does not match its checksum: the states are captured again."""


class FullError(EyasError):
    """The disk or the spool has no room: the caller waits and goes on when there is some."""
