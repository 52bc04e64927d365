"""Which files of the spool go out over HTTP, to lanes that do not share its folder: GET and DELETE.

Only whole spool files under names that a spool may give: the folder may be one with other things in it
by mistake. How a web framework answers is in `route.py` and, for the embedded engine, in
`workers/engine/spool_route.py`.
"""

import os
import stat
import threading
import time
from contextlib import suppress
from typing import BinaryIO

from storage.errors import SpoolLostError
from storage.files import NAME
from storage.spool import FETCHED, Spool
from storage.spool_file import MAGIC

PATH = "/eyas/spool/"
"""Before the file's name."""
CHUNK_BYTES = 1 << 20
"""What a download holds of a file at once."""
GONE = 410
"""HTTP status for a file that is not there. Not 404: that a server answers without this route."""
EVERY_S = 10.0
"""Between two sweeps."""
FETCHED_S = 900.0
"""Age of a file that waits for nobody although it was to be fetched: that takes seconds, its lane died."""
WAITED_FOR_S = 24 * 3600.0
"""Age of any other file that waits for nobody, where no sink sweeps."""
PART_S = 3600.0
"""Age of a file that nobody writes to any more: each minute brings rows, unless its server was killed."""
UNWANTED_S = 60.0
"""How long a name is looked for that was deleted before its file was there."""
UNWANTED_MOST = 10_000
"""Most names looked for."""


class Offered:
    """One spool's files."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._unwanted: dict[str, float] = {}
        self._lock = threading.Lock()

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """The file, at its beginning, and its size; raises `SpoolLostError` when there is none."""
        lost = SpoolLostError(f"spool file `{name[:100]}` is not there", code="spool.missing")
        if not NAME.fullmatch(name):
            raise lost
        try:
            # Neither a link's target nor, waiting for its other end, a pipe.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(self._spool.folder / name, flags)
        except OSError:
            raise lost from None
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or os.pread(handle, len(MAGIC), 0) != MAGIC:
            os.close(handle)
            raise lost
        return os.fdopen(handle, "rb", buffering=0), status.st_size

    def delete(self, name: str) -> bool:
        """Free the file's room; False when it is not there.

        It may still be written, for a client that left: it is looked for again for a while.
        """
        try:
            self.open(name)[0].close()
            (self._spool.folder / name).unlink()
        except (SpoolLostError, FileNotFoundError):
            if NAME.fullmatch(name):
                with self._lock:
                    if len(self._unwanted) < UNWANTED_MOST:
                        self._unwanted.setdefault(name, time.monotonic())
            return False
        with self._lock:
            self._unwanted.pop(name, None)
        return True

    def sweep(self) -> None:
        """Delete what waits for nobody: files of dead lanes, and those that came after their deletion."""
        with self._lock:
            old = time.monotonic() - UNWANTED_S
            self._unwanted = {name: since for name, since in self._unwanted.items() if since > old}
            unwanted = list(self._unwanted)
        for name in unwanted:
            self.delete(name)
        self._spool.sweep(FETCHED_S, FETCHED)
        self._spool.sweep(PART_S, ".part")
        self._spool.sweep(WAITED_FOR_S)

    def sweep_on(self) -> None:
        """Sweep now and then, in a thread, for as long as the process lives."""

        def run() -> None:
            while True:
                time.sleep(EVERY_S)
                with suppress(OSError):
                    self.sweep()

        threading.Thread(target=run, name="eyas-sweep", daemon=True).start()
