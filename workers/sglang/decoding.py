"""The lane's side of decoding: a few `workers.sglang.decode` processes, started when first needed.

What a decoder does with a reply is in `decode.py`.
"""

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

from storage.errors import FullError
from storage.spool import Spool
from workers.sglang.decode import DecodeJob
from workers.sglang.outcomes import CallError
from workers.sglang.reply import Reply, read_reply

PROCESSES = 2
"""More would take cores from a server on the same machine; one reply a time uses one whole."""
DEADLINE_S = 600.0
"""A decoder that takes longer for one reply is killed."""
RESULT_BYTES = 64 << 20
"""Longest line a decoder may say: a reply without its states."""
CLOSE_S = 5.0
"""How long decoders may finish what they do when the lane ends."""


class DecodePool:
    """Decoders of one lane process, on its one event loop."""

    def __init__(self, spool: Spool, processes: int = PROCESSES) -> None:
        self._spool = spool
        self._free = asyncio.Semaphore(processes)
        self._idle: list[Process] = []
        self._running: set[asyncio.Task[Reply]] = set()

    async def decode(self, job: DecodeJob) -> Reply:
        """The reply in the file `job.body`, its states in the spool.

        Raises `CallError` for a reply that is not what was asked for, `FullError` for a full
        spool. Cancelled, it lets the decoder finish and deletes what it wrote.
        """
        task = asyncio.create_task(self._run(job))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._delete)
            raise

    async def close(self) -> None:
        """End every decoder, killing those that do not finish soon."""
        running = set(self._running)
        if running:
            await asyncio.wait(running, timeout=CLOSE_S)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        while self._idle:
            await _end(self._idle.pop())

    async def _run(self, job: DecodeJob) -> Reply:
        async with self._free:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(DEADLINE_S):
                    result = await _exchange(process, job)
            except BaseException as error:
                # Whatever is half-said cannot be taken up again.
                await _end(process, kill=True)
                self._clear(job.name)
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise CallError(f"the decoder failed: {error!r}"[:300], code="states.decoder") from None
            self._idle.append(process)
        match result:
            case {"reply": content}:
                return read_reply(content)
            case {"full": code, "message": message}:
                raise FullError(message, code=code)
            case {"refused": code, "message": message}:
                raise CallError(message, code=code)
            case _:
                raise CallError("the decoder said something else", code="states.decoder")

    async def _start(self) -> Process:
        spool = self._spool
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "workers.sglang.decode", str(spool.folder), spool.node, str(spool.max_bytes)),
            stdin=PIPE,
            stdout=PIPE,
            limit=RESULT_BYTES,
            env=decoder_environ(),
        )

    def _clear(self, name: str) -> None:
        """What a killed decoder may have left under this name."""
        for left in (self._spool.folder / name, *self._spool.folder.glob(f".{name}.*.part")):
            left.unlink(missing_ok=True)

    def _delete(self, task: asyncio.Task[Reply]) -> None:
        if not task.cancelled() and task.exception() is None and (states := task.result().states):
            self._spool.delete(states.ref)


def decoder_environ() -> dict[str, str]:
    """The environment of a decoder, which finds `workers` whatever the working folder."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


async def _exchange(process: Process, job: DecodeJob) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(job.to_line())
    await process.stdin.drain()
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError(f"ended with status {await process.wait()}")
    result = json.loads(line)
    assert isinstance(result, dict)
    return result


async def _end(process: Process, *, kill: bool = False) -> None:
    assert process.stdin is not None
    process.stdin.close()
    if kill:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    try:
        async with asyncio.timeout(CLOSE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
