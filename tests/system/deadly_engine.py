"""The embedded engine with a defect of real servers: some words in a request kill the whole process.

`python -m tests.system.deadly_engine FILE --port …`: FILE is JSON, `{"words": …, "when": …}` a kill,
with `when` one of `generate` and `capture`, read at each request. Everything else is the engine as it is.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from workers.engine.command import command
from workers.engine.generation import Generation

AFTER_S = 0.3
"""By then what came at the same time is being computed."""


class Killer:
    """Looks at each request before the engine answers it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._answer = Generation.handle

    async def handle(self, generation: Any, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = generation._detokenizer.text(body["input_ids"], skip_special=True)
        when = "capture" if body["sampling_params"].get("max_new_tokens") == 1 else "generate"
        kills = json.loads(self._file.read_text())
        if any(kill["words"] in text and kill["when"] == when for kill in kills):
            asyncio.get_running_loop().call_later(AFTER_S, os.kill, os.getpid(), signal.SIGKILL)
        return await self._answer(generation, request)


if __name__ == "__main__":
    killer = Killer(Path(sys.argv.pop(1)))
    Generation.handle = lambda self, request: killer.handle(self, request)  # type: ignore[method-assign]
    command()
