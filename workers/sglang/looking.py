"""Looking at a server that takes calls: when, does it produce tokens, and does it say anything at all.

A long prefill gives no token for a while and is no fault; a process that is stopped does not even
answer that. What follows from a look is in `servers.py`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from enum import Enum, auto

from workers.sglang.client import SGLangClient
from workers.sglang.pace import Pace

MUTE_TIMES = 3
"""Questions in a row that nothing answers, each in the client's own time, before it is mute."""


class Sign(Enum):
    """What a look came to."""

    ADVANCES = auto()
    """It produced a token."""
    STANDS = auto()
    """It did not in its time: it hangs, or is busy with something long."""
    MUTE = auto()
    """Nothing at all answers there, though connections are accepted."""


async def rest(woken: asyncio.Event, silent_s: Callable[[], float], pace: Pace, strikes: int) -> bool:
    """Wait until the server is to be looked at; True when it was woken for something else first.

    `silent_s` gives for how long calls have been waiting in vain: a look then comes before its time.
    """
    until = time.monotonic() + (pace.strike_s if strikes else pace.watch_s)
    while (left_s := until - time.monotonic()) > 0:
        if not strikes:
            if (silence := silent_s()) >= pace.silent_s:
                return False
            left_s = min(left_s, pace.silent_s - silence)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), left_s)
            return True
    return False


async def look(client: SGLangClient, url: str, pace: Pace, in_doubt: Callable[[], object]) -> Sign:
    """Ask for a token; `in_doubt` is called when none has come for a while."""
    asking = asyncio.create_task(client.advances(url, pace.advance_s))
    mute = asyncio.create_task(_mute(client, url, pace))
    try:
        done, _ = await asyncio.wait({asking}, timeout=pace.doubt_s)
        if not done:
            in_doubt()
            await asyncio.wait({asking, mute}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and mute.result():
                return Sign.MUTE
        return Sign.ADVANCES if await asking else Sign.STANDS
    finally:
        asking.cancel()
        mute.cancel()


async def _mute(client: SGLangClient, url: str, pace: Pace) -> bool:
    await asyncio.sleep(pace.doubt_s)
    for _ in range(MUTE_TIMES):
        if await client.answers(url):
            return False
    return True
