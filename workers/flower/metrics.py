"""What Prometheus scrapes of a run: names with units; labels dataset, lane, server, node, code, never ids.

Sums (`…_total`) come from the tally and do not go back while a run lasts; a new run begins at 0.
What is not known is left out, so that an alert can tell it from 0. Pure: from one look at Redis.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.board.board import Board
from workers.board.processes import ServerState
from workers.board.tally import Tally
from workers.broker.queues import SINK
from workers.flower.snapshot import Look

CALLS = {"done": "done", "failed": "dead_letter", "again": "again", "requeued": "requeued"}
"""Counter of a lane → how its call ended: published, given up, made again, put back."""
TOKENS = {"tokens": "output", "prompt_tokens": "prompt"}


def metrics(look: Look, now: float) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Of(look, now))
    return generate_latest(registry)


class _Of(Collector):
    def __init__(self, look: Look, now: float) -> None:
        self._look, self._now = look, now

    def collect(self) -> Iterator[Metric]:
        look, board = self._look, self._look.board
        yield _gauge("eyas_redis_up", "Whether Redis answers.", look.answers)
        if not look.answers:
            return
        yield _gauge("eyas_run_carried", "Whether Redis carries a run.", look.carried is not None)
        yield from _processes(look)
        if board is not None:
            yield from _run(board, self._now)
            yield from _datasets(board)
            yield from _lanes(look, board)
            yield from _servers(look, board)
        yield from _sinks(look, self._now)
        if look.tally is not None:
            yield from _sums(look.tally)


def _gauge(
    name: str, says: str, value: float | None = None, labels: tuple[str, ...] = ()
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, says, labels=labels)
    if value is not None:
        family.add_metric((), float(value))
    return family


def _run(board: Board, now: float) -> Iterator[Metric]:
    yield _gauge("eyas_run_finished", "Whether every wanted prompt has its outcome.", board.finished)
    yield _gauge("eyas_board_age_seconds", "Since a feeder last wrote its figures.", max(0.0, now - board.at))
    if board.left_s is not None:
        yield _gauge("eyas_run_left_seconds", "Time left at this speed, by tokens.", board.left_s)
    yield _gauge("eyas_window_orders", "Orders published and not stored yet.", board.window)
    yield _gauge("eyas_republished_orders", "Orders found lost by the present feeder.", board.republished)
    yield _gauge("eyas_results_waiting", "Results no sink has committed yet.", board.sink_waiting)
    if board.stored_bytes is not None:
        yield _gauge("eyas_stored_bytes", "Bytes of the store on its disk.", board.stored_bytes)
    if board.checks is not None:
        yield _gauge("eyas_checked_samples", "Samples that were checked.", board.checks.samples)
        yield _gauge("eyas_alarmed_samples", "Checked samples with an alarm.", board.checks.alarmed)
    if board.disk_free_bytes is not None:
        yield _gauge("eyas_disk_free_bytes", "Room left where the store is.", board.disk_free_bytes)


def _datasets(board: Board) -> Iterator[Metric]:
    label = ("dataset",)
    counts = {
        "eyas_dataset_wanted_samples": ("Prompts wanted.", "wanted"),
        "eyas_dataset_generated_samples": ("Wanted prompts with a response.", "generated"),
        "eyas_dataset_stored_samples": ("Wanted prompts whose sample is complete.", "stored"),
        "eyas_dataset_failed_samples": ("Dead letters.", "failed"),
        "eyas_dataset_truncated_samples": ("Responses that ended at the token limit.", "truncated"),
        "eyas_dataset_stored_tokens": ("Prompt and response tokens stored.", "tokens"),
    }
    for name, (says, field) in counts.items():
        family = _gauge(name, says, labels=label)
        for one in board.datasets:
            family.add_metric((one.name,), getattr(one, field))
        yield family
    progress = _gauge("eyas_dataset_progress_ratio", "Share that is done, 0 to 1.", labels=label)
    left = _gauge("eyas_dataset_left_seconds", "Time left at its own speed, by tokens.", labels=label)
    dead = _gauge("eyas_dead_letters", "Dead letters by their code.", labels=("dataset", "code"))
    for one in board.datasets:
        progress.add_metric((one.name,), one.share)
        if one.left_s is not None:
            left.add_metric((one.name,), one.left_s)
        for code, count in one.dead_letters.items():
            dead.add_metric((one.name, code), count)
    yield from (progress, left, dead)


def _lanes(look: Look, board: Board) -> Iterator[Metric]:
    at = ("lane", "server")
    flying = _gauge("eyas_lane_in_flight_calls", "Calls in flight.", labels=at)
    limit = _gauge("eyas_lane_limit_calls", "Calls that may be in flight.", labels=at)
    waiting = _gauge("eyas_lane_waiting_orders", "Orders in the queue.", labels=("lane",))
    for lane in board.lanes:
        waiting.add_metric(
            (lane.name,), look.backlog.waiting.get(lane.name, 0) if look.backlog else lane.waiting
        )
        serving = [s for p in look.processes if p.lane == lane.name for s in p.servers]
        for url in dict.fromkeys(server.url for server in serving):
            mine = [server for server in serving if server.url == url]
            flying.add_metric((lane.name, url), sum(server.in_flight for server in mine))
            up = any(server.state is ServerState.UP for server in mine)
            limit.add_metric((lane.name, url), lane.limit_per_server if up else 0)
    yield from (flying, limit, waiting)


def _servers(look: Look, board: Board) -> Iterator[Metric]:
    label = ("server",)
    up = _gauge("eyas_server_up", "Whether it takes calls, by the process that thinks worst.", labels=label)
    used = _gauge("eyas_server_kv_used_ratio", "Share of its KV cache in use, 0 to 1.", labels=label)
    running = _gauge("eyas_server_running_requests", "Requests in its batch.", labels=label)
    queued = _gauge("eyas_server_queued_requests", "Requests that wait in it.", labels=label)
    for one in board.servers:
        up.add_metric((one.url,), one.state is ServerState.UP)
    for url, load in look.loads.items():
        used.add_metric((url,), load.kv_used)
        running.add_metric((url,), load.running)
        queued.add_metric((url,), load.queued)
    yield from (up, used, running, queued)


def _processes(look: Look) -> Iterator[Metric]:
    alive = _gauge("eyas_worker_processes", "Live processes by state.", labels=("lane", "state"))
    counts = Counter((process.lane, process.state) for process in look.processes)
    for labels, count in counts.items():
        alive.add_metric(labels, count)
    yield alive


def _sinks(look: Look, now: float) -> Iterator[Metric]:
    label = ("node",)
    held = _gauge("eyas_spool_bytes", "Bytes in the node's spool.", labels=label)
    limit = _gauge("eyas_spool_limit_bytes", "What it may hold.", labels=label)
    oldest = _gauge("eyas_spool_oldest_seconds", "Age of its oldest file; 0 when empty.", labels=label)
    waiting = _gauge("eyas_node_results_waiting", "Results that wait for the node's sink.", labels=label)
    for process in {p.node: p for p in look.processes if p.lane == SINK}.values():
        node = (process.node,)
        held.add_metric(node, process.spool_bytes or 0)
        limit.add_metric(node, process.spool_max_bytes or 0)
        oldest.add_metric(node, max(0.0, now - process.spool_oldest) if process.spool_oldest else 0.0)
    for name, count in look.backlog.nodes.items() if look.backlog else ():
        waiting.add_metric((name,), count)
    yield from (held, limit, oldest, waiting)


def _sums(tally: Tally) -> Iterator[Metric]:
    tokens = CounterMetricFamily("eyas_tokens", "Tokens of calls that ended well.", labels=("lane", "kind"))
    calls = CounterMetricFamily("eyas_calls", "Calls by how they ended.", labels=("lane", "outcome"))
    wasted = CounterMetricFamily("eyas_wasted_calls", "Calls made twice.", labels=("lane",))
    twice = CounterMetricFamily("eyas_wasted_tokens", "Tokens of calls made twice.", labels=("lane",))
    for lane, counts in tally.lanes.items():
        twice.add_metric((lane,), counts.get("wasted_tokens", 0))
        wasted.add_metric((lane,), counts.get("wasted", 0))
        if lane == SINK:
            continue
        for counter, outcome in CALLS.items():
            calls.add_metric((lane, outcome), counts.get(counter, 0))
        kinds = {"tokens": "captured"} if lane == "capture" else TOKENS
        for counter, kind in kinds.items():
            tokens.add_metric((lane, kind), counts.get(counter, 0))
    retractions = CounterMetricFamily(
        "eyas_server_retractions", "Requests it took back for want of KV room.", labels=("server",)
    )
    for url, count in tally.retractions.items():
        retractions.add_metric((url,), count)
    yield from (tokens, calls, wasted, twice, retractions)
    written = tally.of("written_bytes", SINK)
    yield CounterMetricFamily("eyas_states_written_bytes", "States committed, uncompressed.", value=written)
    lost = tally.of("lost", SINK)
    yield CounterMetricFamily("eyas_spool_lost", "Spool files found lost or damaged.", value=lost)
    yield CounterMetricFamily("eyas_messages_aside", "Messages that were none.", value=tally.of("aside"))
