"""A small file system of its own that can be filled to the last byte; needs root, else a plain folder."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

FILLER = ".filler"


class Disk:
    """A folder; with a size, a tmpfs of that size where this user may mount one."""

    def __init__(self, path: Path, size_mb: int) -> None:
        self.path = path
        path.mkdir()
        self.is_small = bool(size_mb) and os.geteuid() == 0 and self._mount(size_mb)

    def _mount(self, size_mb: int) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=0700", "tmpfs", str(self.path)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self) -> None:
        """Take all the room that is left."""
        assert self.is_small, "never on a disk that others use"
        with (self.path / FILLER).open("ab", buffering=0) as file, suppress(OSError):
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.write(b"\0" * size) == size:
                        pass

    def empty(self) -> None:
        """Give the room back."""
        (self.path / FILLER).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def unmount(self) -> None:
        if self.is_small:
            subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
