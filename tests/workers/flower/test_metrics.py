"""What Prometheus gets, read by its own parser: names with units, few labels, sums that do not go back."""

import dataclasses

from prometheus_client.parser import text_string_to_metric_families

from tests.workers.flower.looks import BOARD, LOOK, NOW, ONE, PROCESSES, TWO, changed, lane_process
from workers.board.tally import add_up
from workers.flower.metrics import metrics
from workers.flower.snapshot import Look

LABELS = {"lane", "server", "dataset", "code", "node", "kind", "outcome", "state"}
UNITS = ("seconds", "bytes", "ratio", "tokens", "samples", "calls", "orders", "requests")
OTHERS = {
    *("eyas_redis_up", "eyas_server_up", "eyas_run_carried", "eyas_run_finished", "eyas_worker_processes"),
    *("eyas_dead_letters", "eyas_results_waiting", "eyas_node_results_waiting", "eyas_messages_aside"),
    *("eyas_spool_lost", "eyas_server_retractions"),
}
"""Counts of things that the name says."""


def scrape(look: Look, now: float = NOW) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics(look, now).decode())
        for sample in family.samples
    }


def value(look: Look, name: str, **labels: str) -> float | None:
    return scrape(look).get((name, tuple(sorted(labels.items()))))


def test_each_figure_has_its_name_and_labels() -> None:
    assert value(LOOK, "eyas_lane_in_flight_calls", lane="short", server=ONE) == 30
    assert value(LOOK, "eyas_lane_limit_calls", lane="short", server=ONE) == 40
    assert value(LOOK, "eyas_lane_limit_calls", lane="short", server=TWO) == 0
    assert value(LOOK, "eyas_lane_waiting_orders", lane="short") == 9
    assert value(LOOK, "eyas_tokens_total", lane="short", kind="output") == 10_000
    assert value(LOOK, "eyas_tokens_total", lane="short", kind="prompt") == 3000
    assert value(LOOK, "eyas_tokens_total", lane="capture", kind="captured") == 10_400
    assert value(LOOK, "eyas_calls_total", lane="short", outcome="done") == 100
    assert value(LOOK, "eyas_calls_total", lane="short", outcome="again") == 4
    assert value(LOOK, "eyas_dead_letters", dataset="B2", code="server.refused") == 2
    assert value(LOOK, "eyas_server_up", server=TWO) == 0
    assert value(LOOK, "eyas_server_kv_used_ratio", server=ONE) == 0.875
    assert value(LOOK, "eyas_spool_oldest_seconds", node="n1") == 12
    assert value(LOOK, "eyas_board_age_seconds") == 1
    assert value(LOOK, "eyas_checked_samples") == 12
    assert value(LOOK, "eyas_alarmed_samples") == 1
    assert value(LOOK, "eyas_wasted_calls_total", lane="sink") == 3
    assert value(LOOK, "eyas_states_written_bytes_total") == 1 << 20


def test_names_say_their_unit_and_labels_are_few() -> None:
    for name, labels in scrape(LOOK):
        assert {label for label, _ in labels} <= LABELS, name
        plain = name.removesuffix("_total")
        assert plain in OTHERS or any(unit in plain.split("_") for unit in UNITS), name


def test_what_is_not_known_is_left_out() -> None:
    assert value(LOOK, "eyas_server_kv_used_ratio", server=TWO) is None
    unknown = dataclasses.replace(BOARD, left_s=None, stored_bytes=None)
    assert value(changed(board=unknown), "eyas_run_left_seconds") is None
    assert value(changed(board=unknown), "eyas_stored_bytes") is None


def test_without_redis_there_is_only_that() -> None:
    assert scrape(Look()) == {("eyas_redis_up", ()): 0}
    nothing = scrape(Look(answers=True))
    assert nothing[("eyas_redis_up", ())] == 1
    assert nothing[("eyas_run_carried", ())] == 0


def test_no_sum_goes_back_when_processes_restart_or_leave() -> None:
    before = scrape(LOOK)
    restarted = lane_process("short@a", "short", {ONE: 1}, started=NOW, done=1, tokens=10)
    tally = add_up(LOOK.tally, [restarted], NOW + 1)
    after = scrape(changed(processes=(restarted,), tally=tally))
    sums = {key for key in before if key[0].endswith("_total")}
    assert len(sums) > 10
    assert all(after[key] >= before[key] for key in sums)
    assert after[("eyas_tokens_total", (("kind", "output"), ("lane", "short")))] == 10_010
    assert len(PROCESSES) == 4


def test_labels_that_need_escaping_are_escaped() -> None:
    odd = dataclasses.replace(BOARD.datasets[0], name='a"b\\c\nd')
    look = changed(board=dataclasses.replace(BOARD, datasets=(odd,)))
    assert value(look, "eyas_dataset_wanted_samples", dataset='a"b\\c\nd') == 200
