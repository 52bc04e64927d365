"""The board from what the feeder and the processes know: adding up, no deciding.

What the numbers mean is in `board.py`, speed in `rates.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from storage.index import DatasetIndex, Outcome, Wanted
from storage.run import StatesMode
from storage.settings import RunSettings
from workers.board.board import DatasetBoard, LaneBoard, ServerBoard, SinkBoard
from workers.board.processes import ProcessSnapshot, ServerState
from workers.board.rates import Totals
from workers.broker.backlog import Backlog
from workers.broker.queues import SINK, Lane

NO_CALLS = (ServerState.UNSUITABLE, ServerState.AWAY, ServerState.SUSPECT)
"""States of a server that takes no new calls."""
WORST_FIRST = (
    *NO_CALLS,
    *(ServerState.UNKNOWN, ServerState.UP),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One dataset, counted once each time the store has grown."""

    plan: Wanted
    generated: int
    truncated: int
    prompt_tokens: int
    response_tokens: int
    finished_tokens: int
    """Prompt and response tokens of the samples that are complete."""
    known_left: int
    """Tokens of the missing prompts' prompts, and of the responses that wait for their states."""
    unknown_left: int
    """Missing prompts whose response is not there yet."""


def progress_of(dataset: DatasetIndex, plan: Wanted, max_samples: int | None, states: StatesMode) -> Progress:
    """Count one dataset."""
    count = len(dataset) if max_samples is None else min(len(dataset), max_samples)
    outcome, tokens = dataset.outcome[:count], dataset.sample_tokens[:count]
    prompts = dataset.prompt_tokens[:count]
    responded = tokens > 0
    complete = outcome == Outcome.STORED
    if states is StatesMode.OFF:
        complete |= outcome == Outcome.RESPONDED
    missing_tokens, missing_prompts = tokens[plan.missing], prompts[plan.missing]
    return Progress(
        plan=plan,
        generated=int(np.count_nonzero(responded)),
        truncated=dataset.truncated,
        prompt_tokens=int(prompts.sum(dtype=np.int64)),
        response_tokens=int((tokens - prompts)[responded].sum(dtype=np.int64)),
        finished_tokens=int(tokens[complete].sum(dtype=np.int64)),
        known_left=int(np.where(missing_tokens > 0, missing_tokens, missing_prompts).sum(dtype=np.int64)),
        unknown_left=int(np.count_nonzero(missing_tokens == 0)),
    )


def totals_of(progress: Mapping[str, Progress]) -> Totals:
    """What the store holds of all datasets."""
    return Totals(
        generated_tokens=sum(p.response_tokens for p in progress.values()),
        stored_tokens=sum(p.finished_tokens for p in progress.values()),
        samples=sum(p.plan.done + p.plan.failed for p in progress.values()),
    )


def tokens_left(progress: Mapping[str, Progress], settings: RunSettings) -> float | None:
    """Tokens of finished samples still to come; None while no response tells how long they are.

    A response that is not there yet counts as the mean of its dataset, or of all of them.
    """
    responses = sum(p.generated for p in progress.values())
    mean = sum(p.response_tokens for p in progress.values()) / responses if responses else None
    left = 0.0
    for name, p in progress.items():
        own = p.response_tokens / p.generated if p.generated else mean
        if p.unknown_left and own is None:
            return None
        ahead = p.known_left + p.unknown_left * (own or 0.0)
        cap = settings.datasets[name].max_tokens
        if cap is not None:
            ahead = min(ahead, max(0, cap - p.finished_tokens))
        left += ahead
    return left


def dataset_board(
    name: str,
    p: Progress,
    settings: RunSettings,
    *,
    reading: bool,
    queued: int,
    left_s: float | None,
    dead_letters: Mapping[str, int],
) -> DatasetBoard:
    """One dataset's row."""
    caps = settings.datasets[name]
    return DatasetBoard(
        name=name,
        wanted=p.plan.total,
        reading=reading,
        generated=p.generated,
        stored=p.plan.done,
        failed=p.plan.failed,
        truncated=p.truncated,
        tokens=p.plan.tokens,
        prompt_tokens=p.prompt_tokens,
        queued=queued,
        max_samples=caps.max_samples,
        max_tokens=caps.max_tokens,
        closed=p.plan.closed,
        finished=p.plan.finished and not reading,
        left_s=left_s,
        dead_letters=dead_letters,
    )


def lane_boards(
    settings: RunSettings, processes: Sequence[ProcessSnapshot], backlog: Backlog
) -> tuple[LaneBoard, ...]:
    """Each lane that has a limit, a process or a message."""
    rows = []
    for lane in Lane:
        serving = [p for p in processes if p.lane == lane]
        urls = settings.server_urls
        if lane is Lane.CAPTURE:
            urls = settings.capture_urls or settings.server_urls
        up = {s.url for p in serving for s in p.servers if s.state is ServerState.UP} & set(urls)
        limit = settings.concurrency.get(lane, 0)
        if serving or backlog.waiting[lane] or limit:
            rows.append(
                LaneBoard(
                    name=lane,
                    limit_per_server=limit,
                    limit=limit * (len(up) if serving else len(set(urls))),
                    in_flight=sum(p.in_flight for p in serving),
                    waiting=backlog.waiting[lane],
                    processes=len(serving),
                )
            )
    return tuple(rows)


def server_boards(settings: RunSettings, processes: Sequence[ProcessSnapshot]) -> tuple[ServerBoard, ...]:
    """Each server the run names, as the process that thinks worst of it sees it."""
    rows = []
    for url in dict.fromkeys((*settings.server_urls, *settings.capture_urls)):
        seen = [(p.lane, s) for p in processes for s in p.servers if s.url == url]
        worst = min((s for _, s in seen), key=lambda s: WORST_FIRST.index(s.state), default=None)
        rows.append(
            ServerBoard(
                url=url,
                lanes=tuple(sorted({lane for lane, _ in seen})),
                state=worst.state if worst else ServerState.UNKNOWN,
                since=worst.since if worst else None,
                reason=worst.reason if worst else "no lane process has looked yet",
                in_flight=sum(s.in_flight for _, s in seen),
            )
        )
    return tuple(rows)


def sink_boards(processes: Sequence[ProcessSnapshot], backlog: Backlog) -> tuple[SinkBoard, ...]:
    """Each live sink."""
    return tuple(
        SinkBoard(
            name=p.name,
            node=p.node,
            state=p.state,
            says=p.says,
            waiting=p.in_flight + backlog.nodes.get(p.node, 0),
            spool_bytes=p.spool_bytes,
            spool_max_bytes=p.spool_max_bytes,
        )
        for p in processes
        if p.lane == SINK
    )
