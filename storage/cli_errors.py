"""The edge of a command line: runs a click command, prints what it raises, gives the exit status.

`error: …`, a blank line, `hint: …` on stderr. 0 done, 1 failed, 2 wrong command or settings,
3 something needed is missing or unsuitable, 130 interrupted. It knows no command.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

import click

from storage.errors import EyasError, FullError

INTERRUPTED = 130
"""128 + SIGINT, as shells say it."""


def run_command(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command as `name`; its exit status.

    Output leaves line by line even into a file: an empty log for a minute looks like a hang. What
    the locale cannot write is a `?`: a bar or a name must not end a command.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="replace")
    try:
        with _ended_by_signals():
            status = command.main(args=arguments, prog_name=name, standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout again while it ends; into nothing it cannot complain a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.exceptions.NoArgsIsHelpError as asked:
        print(asked.ctx.get_help(), file=sys.stderr)  # noqa: T201
        return 2
    except Exception as error:  # the outermost edge of the process
        return print_error(error)
    return status if isinstance(status, int) else 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that nothing temporary stays behind; a second signal
    of either kind ends it at once.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only there signals may be set
        yield
        return
    before = [signal.signal(each, interrupt) for each in numbers]
    try:
        yield
    finally:
        for each, handler in zip(numbers, before, strict=True):
            signal.signal(each, handler)


def print_error(error: Exception, stream: TextIO | None = None) -> int:
    """Print the error as `error: …`, a blank line, `hint: …`; the exit status it stands for.

    With `EYAS_DEBUG` set the traceback comes first.
    """
    stream = stream or sys.stderr
    if os.environ.get("EYAS_DEBUG"):
        traceback.print_exception(error, file=stream)
    message, hint, status = _said(error)
    print(f"error: {message}", file=stream)
    if hint:
        print(f"\nhint: {hint}", file=stream)
    stream.flush()
    return status


def _said(error: Exception) -> tuple[str, str | None, int]:
    match error:
        case FullError():  # a worker waits and goes on by itself; a command has ended
            return error.message, "free some room there, then run the same command again", error.exit_status
        case EyasError():
            return error.message, error.hint, error.exit_status
        case click.UsageError():
            where = error.ctx.command_path if error.ctx else None
            return error.format_message(), f"{where} --help" if where else None, 2
        case click.ClickException():
            return error.format_message(), None, error.exit_code
        case OSError(strerror=str(why), filename=str(path)):
            # the machine's doing: full, too long, not allowed; the file says where to look
            return f"`{path}`: {why}", "see to that file or folder, then run the same command again", 3
        case _:
            hint = "this is a defect of Eyas: please report it with the output of EYAS_DEBUG=1"
            return f"{type(error).__name__}: {error}", hint, 1
