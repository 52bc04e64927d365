"""Lane processes: real ones, on a real Redis, calling a real server."""

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from broker_stage import ROOT, SPEC, Stage, until

from storage.run import CaptureSpec, Run, StatesMode
from storage.tokens import response_digest
from workers.broker.messages import Capture, Captured, Responded


def test_orders_become_results_and_nothing_is_left_behind(stage: Stage) -> None:
    server = stage.server(seconds=0.05)
    stage.settings(server_urls=(server.url,))
    orders = stage.orders(60)
    stage.publish(orders)
    stage.worker()
    until(lambda: stage.waiting("sink") == 60 and not stage.unacked(), "every order is done")
    results = stage.results()
    assert {r.response.id for r in results if isinstance(r, Responded)} == {o.id for o in orders}
    assert server.stats()["peak"] <= 10, "the limit of the lane"
    # The facts of the server are in Redis under the name that the results carry.
    named = {r.response.facts_id for r in results if isinstance(r, Responded)}
    assert {field.decode() for field in stage.redis.hkeys("eyas:facts")} == named

    snapshot = until(
        lambda: (s := stage.snapshot()) and s["done"] == 60 and not s["in_flight"] and s, "it says so"
    )
    assert snapshot["lane"] == "short"
    assert snapshot["tokens"] == 60 * 16
    assert snapshot["servers"][0]["state"] == "up"
    assert snapshot["servers"][0]["slots"] == 10


@pytest.mark.parametrize(
    "before",
    [
        {"run": Run(id="f" * 32, spec=SPEC)},
        {"closed": frozenset({"B1"})},
    ],
    ids=["of a run that has just begun", "of a dataset that was opened again"],
)
def test_orders_younger_than_a_lanes_view_of_the_run_are_not_dropped(
    stage: Stage, before: dict[str, Any]
) -> None:
    server = stage.server(seconds=0.05)
    stage.timing |= {"pulse_s": 1.5, "slots_s": 6}
    now, stage.view = stage.view, replace(stage.view, **before)
    stage.settings(server_urls=(server.url,))
    stage.worker()
    until(lambda: (s := stage.snapshot()) and s["state"] == "running", "it has seen the view before")
    stage.view = now
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(20))
    until(lambda: stage.waiting("sink") == 20 and not stage.unacked(), "every order is done")


def test_two_processes_share_a_limit_fairly_and_never_exceed_it_whatever_it_becomes(stage: Stage) -> None:
    server = stage.server(seconds=0.3)
    stage.settings(server_urls=(server.url,), concurrency={"short": 30})
    stage.publish(stage.orders(3000))
    stage.worker(name="one", capacity=40)
    stage.worker(name="two", capacity=40)

    def slots(name: str) -> int:
        snapshot = stage.snapshot(name)
        return snapshot["servers"][0]["slots"] if snapshot and snapshot["servers"] else -1

    until(lambda: slots("one") == slots("two") == 15, "an equal share each")
    until(lambda: server.stats()["in_flight"] == 30, "the limit is filled")
    assert server.stats()["peak"] == 30

    stage.settings(concurrency={"short": 10})
    until(lambda: slots("one") == slots("two") == 5, "the lower limit is known")
    until(lambda: server.stats()["in_flight"] <= 10, "calls above it have ended")
    server.set(reset_peak=True)
    before = server.stats()["ended"]
    until(lambda: server.stats()["ended"] > before + 40, "it goes on")
    assert server.stats()["peak"] <= 10

    stage.settings(concurrency={"short": 0})
    until(lambda: slots("one") == slots("two") == 0, "the pause is known")
    until(lambda: not server.stats()["in_flight"], "nothing runs any more")
    # Not even the messages that were on their way to a process are kept from the others.
    until(lambda: not stage.unacked(), "nothing is held")
    started = server.stats()["started"]
    assert stage.waiting() + server.stats()["ended"] == 3000

    server.set(reset_peak=True)
    stage.settings(concurrency={"short": 20})
    until(lambda: server.stats()["in_flight"] == 20, "it goes on after the pause")
    assert server.stats()["peak"] == 20
    assert server.stats()["started"] > started


def test_a_process_takes_over_the_share_of_one_that_was_killed_and_its_orders(stage: Stage) -> None:
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,), concurrency={"short": 8})
    orders = stage.orders(8)
    stage.publish(orders)
    killed = stage.worker(name="one")
    until(lambda: server.stats()["in_flight"] == 8, "all orders run")
    stage.worker(name="two")
    until(lambda: stage.snapshot("two"), "the other is there")
    assert stage.waiting() == 0
    killed.kill()
    server.set(seconds=0.1)
    until(lambda: stage.waiting("sink") == 8, "every order is done by the other", within_s=20)
    until(lambda: not stage.unacked(), "and acknowledged")
    assert len({r.response.id for r in stage.results() if isinstance(r, Responded)}) == 8
    assert server.stats()["most"] == 2


def test_a_call_longer_than_the_visibility_timeout_runs_once(stage: Stage) -> None:
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(5))
    stage.worker(name="one")
    until(lambda: server.stats()["in_flight"] == 5, "all orders run")
    stage.worker(name="two")
    until(lambda: stage.snapshot("two"), "the other is there, and looks for old leases")
    ages = []

    def renewed_after_the_timeout() -> bool:
        scores = [score for _, score in stage.redis.zrange("unacked_index", 0, -1, withscores=True)]
        ages.append(min(scores))
        return len(scores) == 5 and min(scores) - ages[0] > 2.5 * stage.timing["visibility_s"]

    until(renewed_after_the_timeout, "two and a half timeouts have passed")
    assert server.stats()["started"] == 5
    server.set(release=True)
    until(lambda: stage.waiting("sink") == 5 and not stage.unacked(), "all end")
    assert server.stats()["started"] == 5


def test_calls_go_to_the_server_with_the_most_free_slots_and_fill_each_to_its_own_limit(stage: Stage) -> None:
    one, two = stage.server(seconds=0.3), stage.server(seconds=0.3)
    stage.settings(server_urls=(one.url, two.url), concurrency={"short": 6})
    stage.publish(stage.orders(200))
    stage.worker(capacity=20)
    until(lambda: one.stats()["in_flight"] == two.stats()["in_flight"] == 6, "both are filled")
    assert one.stats()["peak"] == two.stats()["peak"] == 6


def test_orders_of_a_server_that_died_go_to_another_and_nothing_fails_or_spins(stage: Stage) -> None:
    one, two = stage.server(seconds=0.3), stage.server(seconds=0.3)
    stage.settings(server_urls=(one.url, two.url), concurrency={"short": 5})
    orders = stage.orders(100)
    stage.publish(orders)
    stage.worker()
    until(lambda: one.stats()["in_flight"] == 5 and two.stats()["in_flight"] == 5, "both are called")
    one.process.kill()
    two.process.kill()
    until(
        lambda: (s := stage.snapshot()) and {each["state"] for each in s["servers"]} == {"away"},
        "both are known to be away",
    )
    until(lambda: not stage.unacked(), "their calls are back in the queue")
    done = stage.waiting("sink")
    assert stage.waiting() == 100 - done
    again = stage.server(seconds=0.05, port=two.port)
    until(lambda: stage.waiting("sink") == 100, "all are done by the one that came back")
    assert all(isinstance(result, Responded) for result in stage.results())
    assert again.stats()["peak"] <= 5
    snapshot = stage.snapshot()
    assert snapshot is not None
    assert snapshot["requeued"] <= 40, "no order went round and round"
    assert snapshot["failed"] == 0


@pytest.mark.slow
def test_a_server_that_answers_its_probe_but_no_call_does_not_make_orders_spin(stage: Stage) -> None:
    server = stage.server(seconds=0.05)
    server.set(failing="calls")
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(50))
    stage.worker()
    until(lambda: (s := stage.snapshot()) and s["requeued"] > 12, "it has come and gone several times")
    began = stage.snapshot()
    later = until(
        lambda: (s := stage.snapshot()) and began and s["at"] > began["at"] + 5 and s, "five seconds"
    )
    assert began is not None
    assert later["requeued"] - began["requeued"] < 40
    server.set(failing="")
    until(lambda: stage.waiting("sink") == 50, "and all is done once it answers")


@pytest.mark.slow
def test_nothing_runs_twice_when_every_connection_to_redis_is_cut(stage: Stage) -> None:
    stage.timing["visibility_s"] = 10
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,), concurrency={"short": 20})
    stage.publish(stage.orders(10))
    busy = stage.worker(name="one", capacity=10)
    until(lambda: server.stats()["in_flight"] == 10, "all orders run")
    # One with room for all of them, should they go back to the queue.
    idle = stage.worker(name="two", capacity=10)
    until(lambda: stage.snapshot("two"), "the other is there")
    for _ in range(3):
        cut = stage.redis.time()[0]
        stage.redis.execute_command("CLIENT", "KILL", "SKIPME", "yes")
        for name in ("one", "two"):
            until(
                lambda name=name, cut=cut: (s := stage.snapshot(name)) and s["at"] > cut + 2,
                "it lives on",
            )
    assert "lane.reconnected carried=10" in busy.text()
    server.set(release=True)
    until(lambda: stage.waiting("sink") == 10, "the results are there")
    until(lambda: not stage.unacked() and not stage.waiting(), "and everything is acknowledged")
    assert server.stats()["started"] == 10
    assert not idle.ended()


FINAL = CaptureSpec(name="final", hs_indices=(2,), norm="post", hidden_size=4)


def captures(stage: Stage, count: int) -> list[Capture]:
    """Orders to capture so many sequences."""
    return [
        Capture(
            run=order.run,
            id=order.id,
            digest=response_digest(order.prompt),
            dataset=order.dataset,
            tokens=order.prompt,
            prompt_length=3,
            capture="final",
        )
        for order in stage.orders(count)
    ]


def test_a_spool_folder_that_was_removed_is_made_again_and_capturing_goes_on(stage: Stage) -> None:
    server = stage.server(seconds=0.05)
    stage.settings(capture_urls=(server.url,), capture=FINAL, states=StatesMode.REPLAY)
    stage.worker("capture")
    until(lambda: (s := stage.snapshot("capture")) and s["state"] == "running", "it runs")
    shutil.rmtree(stage.folder / "spool")
    stage.publish(captures(stage, 6))
    until(lambda: stage.waiting("sink.node1") == 6, "all are captured")
    assert all(isinstance(result, Captured) for result in stage.results("sink.node1"))


def test_a_full_spool_pauses_the_lane_and_fails_nothing(stage: Stage) -> None:
    server = stage.server(seconds=0.05)
    stage.settings(capture_urls=(server.url,), capture=FINAL, states=StatesMode.REPLAY)
    spool = stage.folder / "spool"
    spool.mkdir(mode=0o700)
    (spool / "other").write_bytes(bytes(200_000))
    stage.publish(captures(stage, 6))
    worker = stage.worker("capture", EYAS_SPOOL_MAX_GB="0.0001")
    until(
        lambda: (s := stage.snapshot("capture")) and s["state"] == "paused" and "full" in s["says"],
        "it pauses and says why",
    )
    until(lambda: stage.waiting("capture") == 6 and not stage.unacked(), "the orders are in the queue")
    assert server.stats()["started"] == 0
    (spool / "other").unlink()
    until(lambda: stage.waiting("sink.node1") == 6, "it goes on once there is room")
    results = [result for result in stage.results("sink.node1") if isinstance(result, Captured)]
    assert {result.states.spool.shape for result in results} == {(5, 1, 4)}
    assert all((spool / result.states.spool.name).exists() for result in results)
    assert "Traceback" not in worker.text()


@pytest.mark.slow
def test_two_processes_of_one_name_do_not_double_the_limit(stage: Stage) -> None:
    server = stage.server(seconds=0.5)
    stage.settings(server_urls=(server.url,), concurrency={"short": 6})
    stage.publish(stage.orders(60))
    stage.worker(name="one")
    until(lambda: server.stats()["in_flight"] == 6, "the first runs")
    other = stage.worker(name="one")
    until(lambda: "another process is called `one@test`" in other.text(), "the second says why it waits")
    assert server.stats()["peak"] == 6
    until(lambda: stage.waiting("sink") == 60, "the first does it all")


def test_a_process_told_to_end_gives_its_calls_back_and_is_gone_in_seconds(stage: Stage) -> None:
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(15))
    worker = stage.worker()
    until(lambda: server.stats()["in_flight"] == 10, "ten run, five wait")
    worker.signal(signal.SIGTERM)
    until(worker.ended, "it ends", within_s=stage.timing["drain_s"] + 5)
    assert worker.popen.returncode == 0
    assert stage.waiting() == 15
    assert stage.unacked() == 0
    until(lambda: server.stats()["left"] == 10, "the server knows that nobody waits")
    assert stage.snapshot() is None
    assert stage.redis.hlen("eyas:slots:short") == 0


def test_calls_that_end_within_the_grace_are_published_and_acknowledged(stage: Stage) -> None:
    stage.timing["drain_s"] = 30
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(15))
    worker = stage.worker()
    until(lambda: server.stats()["in_flight"] == 10, "ten run, five wait")
    worker.signal(signal.SIGTERM)
    until(lambda: "drain.begun" in worker.text(), "it has been told")
    server.set(release=True)
    until(worker.ended, "it ends long before the grace does", within_s=10)
    assert stage.waiting("sink") == 10
    assert stage.waiting() == 5
    assert stage.unacked() == 0
    assert server.stats()["started"] == 10


def test_a_second_signal_does_not_wait_for_the_grace(stage: Stage) -> None:
    stage.timing["drain_s"] = 100
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(10))
    worker = stage.worker()
    until(lambda: server.stats()["in_flight"] == 10, "ten run")
    worker.signal(signal.SIGTERM)
    until(lambda: "drain.begun" in worker.text(), "it has been told")
    worker.signal(signal.SIGTERM)
    until(worker.ended, "it ends at once", within_s=5)
    assert stage.waiting() == 10
    assert stage.unacked() == 0


@pytest.mark.slow
def test_a_shutdown_by_remote_control_gives_calls_back_too(stage: Stage) -> None:
    server = stage.server(seconds=60)
    stage.settings(server_urls=(server.url,))
    stage.publish(stage.orders(10))
    worker = stage.worker()
    until(lambda: server.stats()["in_flight"] == 10, "ten run")
    stage.app.control.shutdown()
    until(worker.ended, "it ends", within_s=stage.timing["drain_s"] + 8)
    assert stage.waiting() == 10
    assert stage.unacked() == 0


def test_a_lane_imports_neither_zarr_nor_transformers() -> None:
    modules = "workers.broker.worker, workers.broker.consuming, workers.celery, workers.lane.lane"
    modules += ", workers.lane.tasks"
    script = (
        f"import sys, {modules}; print([m for m in ('zarr', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "[]\n"
