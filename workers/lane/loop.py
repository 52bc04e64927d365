"""The one asyncio loop of a process, on a thread of its own, driven from Celery's threads.

Celery has no asyncio pool and a thread cannot be stopped, but a coroutine can be cancelled: that
is what lets a process end within seconds of SIGTERM in the middle of ten-minute calls.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs until `stop`."""

    def __init__(self, name: str = "loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, awaited on the loop; the calling thread waits.

        Raises `concurrent.futures.CancelledError` when `cancel_all` came first.
        """
        with self._lock:
            if self._closed:
                work.close()
                raise concurrent.futures.CancelledError
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running.add(future)
        try:
            return future.result()
        finally:
            with self._lock:
                self._running.discard(future)

    def start(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Begin something that nobody waits for and `cancel_all` leaves alone."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def cancel_all(self) -> int:
        """Cancel what `run` is waiting for, and whatever `run` is asked from now on."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for future in running:
            future.cancel()
        return len(running)

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the loop and its thread, cancelling what is left."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with contextlib.suppress(concurrent.futures.TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()
