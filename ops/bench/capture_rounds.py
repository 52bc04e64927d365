"""One round of `capture.py`: a load sent to a server in one way, as a lane does it, and what it cost.

A lane's work on a reply is done too, but for decoding JSON, which is another process's (`decode.py`):
states in a shared folder are checked, over HTTP they are fetched; files are deleted as a sink would.
"""

import asyncio
import json
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from ops.bench.report import say
from ops.bench.sglang_server import Server
from storage.sample import SpoolRef
from storage.spool import Spool
from workers.sglang.client import SGLangClient
from workers.sglang.fetching import delete, fetch
from workers.sglang.outcomes import CallError, ServerAwayError

REPLY_WITHIN_S = 60.0
VOCABULARY = 2048
"""As in `wide_model.py`, which only SGLang's Python can import."""


class States(StrEnum):
    """How states are asked for."""

    NOT = "not"
    REPLY = "reply"
    """As JSON."""
    FOLDER = "folder"
    HTTP = "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent in one round."""

    name: str
    requests: int
    prompt_tokens: int
    new_tokens: int
    at_once: int

    @property
    def tokens(self) -> int:
        """Tokens computed, and rows that a capture gives."""
        return self.requests * (self.prompt_tokens + self.new_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One way of asking one server."""

    name: str
    server: Server
    states: States
    there: Spool
    """The server's."""
    here: Spool
    """A lane's that shares no folder with it; replies lie there too while they are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One load on one server."""

    seconds: float
    scheduler_cpu_s: float
    server_cpu_s: float
    """Of all of its processes."""
    lane_cpu_s: float
    http_bytes: int
    """Bodies of all replies."""


def unstalled(load: Load, turn: Turn, seed: int) -> Round:
    """A round; one in which a reply stays away is begun anew.

    SGLang 0.5.23 was seen to leave replies lying for minutes until another request came, without any
    plugin and without states: that is no measure of a capture.
    """
    while True:
        try:
            return asyncio.run(_round(load, turn, seed))
        except (CallError, ServerAwayError) as error:
            if error.code not in ("server.slow", "server.hanging"):
                raise
            say(f"{load.name} {turn.name}: a reply stayed away for {REPLY_WITHIN_S:g} s, once more")


async def _round(load: Load, turn: Turn, seed: int) -> Round:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(10, VOCABULARY, (load.requests, load.prompt_tokens)).tolist()
    free = asyncio.Semaphore(load.at_once)
    async with SGLangClient() as client:

        async def one(prompt: list[int]) -> int:
            async with free:
                return await _ask(client, load, turn, prompt)

        before, begun, used = turn.server.cpu_s(), time.monotonic(), time.process_time()
        sizes = await asyncio.gather(*map(one, prompts))
        seconds, lane_cpu_s = time.monotonic() - begun, time.process_time() - used
        after = turn.server.cpu_s()
    return Round(
        seconds=seconds,
        scheduler_cpu_s=after[0] - before[0],
        server_cpu_s=after[1] - before[1],
        lane_cpu_s=lane_cpu_s,
        http_bytes=sum(sizes),
    )


async def _ask(client: SGLangClient, load: Load, turn: Turn, prompt: list[int]) -> int:
    """Send one request and do with its states what a lane does; bytes that came over HTTP."""
    name, url = secrets.token_hex(12), turn.server.url
    sampling: dict[str, Any] = {"max_new_tokens": load.new_tokens, "temperature": 0, "ignore_eos": True}
    if turn.states in (States.FOLDER, States.HTTP):
        sampling["custom_params"] = {"eyas": {"states": "spool", "name": name}}
    asked = {
        "input_ids": prompt,
        "sampling_params": sampling,
        "return_hidden_states": turn.states is not States.NOT,
    }
    body = turn.here.folder / f".{name}.json.part"
    try:
        await client.generate_to_file(url, asked, body, max_bytes=1 << 32, deadline_s=REPLY_WITHIN_S)
        size = body.stat().st_size
        if turn.states in (States.NOT, States.REPLY):
            return size
        ref = _ref(body)
    finally:
        body.unlink(missing_ok=True)
    if turn.states is States.FOLDER:
        assert (await asyncio.to_thread(turn.there.check_values, ref)).ok
        turn.there.delete(ref)
        return size
    ours = await fetch(client, url, ref, turn.here, name)
    await delete(client, url, name)
    turn.here.delete(ours)
    return size + ref.size_bytes


def _ref(body: Path) -> SpoolRef:
    said = json.loads(body.read_bytes())["meta_info"]["eyas_states"]
    t, layers, hidden = said["shape"]
    return SpoolRef(node=said["node"], name=said["name"], shape=(t, layers, hidden), crc32=said["crc32"])
