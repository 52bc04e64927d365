"""What healthy servers say of their load, asked every few seconds, and how often they took a request back.

For people to look at: nothing is decided by it. A server that does not say, or a router before
several that does not know the question, is left out.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from storage.errors import EyasError
from workers.board.processes import ServerLoad, ServerSnapshot
from workers.sglang.client import SGLangClient

EVERY_S = 3.0
DEADLINE_S = 5.0
"""A server that is that slow to say says nothing this time."""


class Loads:
    """The loads of one lane process's servers. `follow` runs on its event loop."""

    def __init__(
        self, client: SGLangClient, healthy: Callable[[], Sequence[str]], every_s: float = EVERY_S
    ) -> None:
        self._client, self._healthy, self._every_s = client, healthy, every_s
        self._loads: Mapping[str, ServerLoad] = {}
        self._retractions: Counter[str] = Counter()
        self._counting = threading.Lock()

    def retracted(self, url: str, times: int) -> None:
        """A reply of this server said so; safe from any thread."""
        with self._counting:
            self._retractions[url] += times

    def complete(self, snapshot: ServerSnapshot) -> ServerSnapshot:
        """The snapshot with what is known here; safe from any thread."""
        url = snapshot.url
        return replace(snapshot, load=self._loads.get(url), retractions=self._retractions[url])

    async def follow(self) -> None:
        """Ask all healthy servers again and again, until cancelled."""
        while True:
            urls = tuple(self._healthy())
            found = await asyncio.gather(*(self._ask(url) for url in urls))
            self._loads = {url: load for url, load in zip(urls, found, strict=True) if load is not None}
            await asyncio.sleep(self._every_s)

    async def _ask(self, url: str) -> ServerLoad | None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return read_loads(await self._client.loads(url))
        except (EyasError, TimeoutError, OSError):
            return None
        # The edge where a foreign server's words enter; the lane must go on.
        except Exception:
            return None


def read_loads(content: Mapping[str, Any]) -> ServerLoad | None:
    """The load in a body of `/v1/loads`, over all ranks; None when there is none in it."""
    try:
        ranks = [
            ServerLoad(
                running=int(rank["num_running_reqs"]),
                queued=int(rank["num_waiting_reqs"]),
                kv_used=min(1.0, max(0.0, float(rank["token_usage"]))),
            )
            for rank in content["loads"]
        ]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not ranks:
        return None
    return ServerLoad(
        running=sum(rank.running for rank in ranks),
        queued=sum(rank.queued for rank in ranks),
        kv_used=max(rank.kv_used for rank in ranks),
    )
