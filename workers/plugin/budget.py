"""How much host memory rows may take before they are written, over all requests of a scheduler process."""

import threading

from storage.errors import FullError


class Budget:
    """Bytes of rows that are held; safe from any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._held

    @property
    def tight(self) -> bool:
        """Whether half of it is taken: then nothing is held that could be written."""
        return self._held > self._limit // 2

    def take(self, size_bytes: int) -> None:
        """Hold so much more, or the only thing that is held.

        Raises `FullError` when that is too much: rows come faster than the spool takes them.
        """
        with self._lock:
            held = self._held
            if not held or held + size_bytes <= self._limit:
                self._held = held + size_bytes
                return
        raise FullError(
            f"`{held}` bytes of states wait to be written: the spool is slower than the server",
            code="spool.full",
        )

    def give_back(self, size_bytes: int) -> None:
        """Hold so much less."""
        with self._lock:
            self._held -= size_bytes
