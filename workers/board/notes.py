"""What a person should know of a run now, a sentence each: what is away, paused or missing.

The feeder puts them on the board and reminds its log of what lasts. Nothing is decided by them.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from workers.board.board import ServerBoard
from workers.board.processes import PROCESS_TTL_S, ProcessSnapshot, ServerState
from workers.board.scoreboard import NO_CALLS
from workers.broker.backlog import Backlog
from workers.broker.queues import SINK, Lane

logger = logging.getLogger(__name__)

CLOCKS_APART_S = 20.0
"""A clock that is off by more is said; leases follow the clock of Redis."""
REMIND_S = 60.0
"""Between two lines of the log about a server that takes no calls."""


def notes_of(
    servers: Sequence[ServerBoard],
    processes: Sequence[ProcessSnapshot],
    backlog: Backlog,
    wanted_lanes: Mapping[Lane, int],
    suspects: int = 0,
) -> tuple[str, ...]:
    """All of them. `wanted_lanes`: lane → orders that are out for it; `suspects`: see `lane/marks.py`."""
    notes = [_away(s, servers, backlog) for s in servers if s.state in NO_CALLS]
    alike: dict[tuple[str, str], list[str]] = {}
    for p in processes:
        if p.state != "running" and p.says:
            alike.setdefault((p.state, p.says), []).append(p.name)
    notes += [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {state}: {says}"
        for (state, says), names in alike.items()
    ]
    serving = {p.lane for p in processes}
    notes += [
        f"no worker serves the lane {lane}: start one with `celery -A workers worker -Q {lane}`"
        for lane, orders in wanted_lanes.items()
        if orders and lane not in serving
    ]
    sink_nodes = {p.node for p in processes if p.lane == SINK}
    notes += [
        f"{count} results wait for a sink on node {node}"
        for node, count in backlog.nodes.items()
        if count and node not in sink_nodes
    ]
    if suspects:
        notes.append(
            f"{suspects} orders were in flight at two deaths of a server: they run apart from all others, "
            "until the one that kills it is found"
        )
    return tuple(notes)


def clock_notes(processes: Sequence[ProcessSnapshot], redis_now: float) -> tuple[str, ...]:
    """Nodes whose clock is not Redis' own: what they said just now was said at another time."""
    apart = {}
    for process in processes:
        off_s = process.at - redis_now
        # What is still there was said within its time to live.
        if not -PROCESS_TTL_S - CLOCKS_APART_S < off_s < CLOCKS_APART_S:
            apart[process.node] = off_s
    return tuple(
        f"the clock of node {node} is off by {span(abs(off_s))} against that of Redis: "
        "the times that `status` shows of it are wrong; set it by NTP"
        for node, off_s in apart.items()
    )


def span(seconds: float) -> str:
    """A time in its largest unit: `45 s`, `12 min`, `5 h`."""
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{max(0, int(seconds))} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"


class Reminder:
    """Tells the log of servers that take no calls, again and again for as long as they do not."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def look(self, servers: Sequence[ServerBoard], backlog: Backlog, now: float) -> None:
        """`now` is a clock of seconds."""
        away = {server.url: server for server in servers if server.state in NO_CALLS}
        self._told = {url: at for url, at in self._told.items() if url in away}
        for url, server in away.items():
            if now - self._told.setdefault(url, now - REMIND_S) >= REMIND_S:
                self._told[url] = now
                logger.warning(
                    "server.%s url=%s lanes=%s for_s=%d waiting=%d",
                    server.state,
                    url,
                    ",".join(server.lanes),
                    time.time() - server.since if server.since is not None else 0,
                    waiting_for(server, servers, backlog),
                )


def waiting_for(server: ServerBoard, servers: Sequence[ServerBoard], backlog: Backlog) -> int:
    """Orders that wait for nothing but this server."""
    up = {lane for other in servers if other.state is ServerState.UP for lane in other.lanes}
    return sum(backlog.waiting[lane] for lane in server.lanes if lane not in up)


def _away(server: ServerBoard, servers: Sequence[ServerBoard], backlog: Backlog) -> str:
    waiting = waiting_for(server, servers, backlog)
    since = "" if server.since is None else f" for {span(time.time() - server.since)}"
    wait = f", {waiting} wait" if waiting else ""
    return f"{', '.join(server.lanes)}: server {server.url} {server.state}{since}{wait}: {server.reason}"
