"""SIGTERM to anything: out within its grace, its calls cancelled on the server, nothing lost or left."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from producer.machine.redis_server import free_port
from tests.producer.machine.supervised import until
from tests.system.machine import Machine, machine_in

GRACE_S = 3
ENDLESS = ("--engine-pace-tpot-ms", "600000")
"""Calls that would take hours; a probe, of one token, takes no time."""
SLACK_S = 20
"""Time that a machine under load takes for what an idle one does at once."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with machine_in(tmp_path) as it:
        it.environment["EYAS_GRACE_S"] = str(GRACE_S)
        (tmp_path / "p.jsonl").write_text(
            "".join(json.dumps({"prompt": f"number {n}"}) + "\n" for n in range(12))
        )
        yield it


def up(machine: Machine, *flags: str) -> None:
    """Everything, the engine at the same address each time: a run keeps the one it was begun with."""
    port = machine.environment.setdefault("EYAS_ENGINE_PORT", str(free_port()))
    done = machine.producer("up", "--engine", "--engine-port", port, "--no-flower", *flags)
    assert done.returncode == 0, done.stderr


def enqueue(machine: Machine) -> None:
    done = machine.producer("enqueue", "--manifest", "p.jsonl", "--short-max-tokens", "8", "--no-watch")
    assert done.returncode == 0, done.stderr


def running_calls(machine: Machine) -> int:
    """What the engine itself has in flight."""
    with urllib.request.urlopen(f"{machine.state['engine_url']}/v1/loads", timeout=20) as reply:
        loads = json.loads(reply.read())
    return sum(one["num_running_reqs"] + one["num_waiting_reqs"] for one in loads["loads"])


def around(machine: Machine) -> set[str]:
    """Files below the temporary folder and the spool."""
    places = (machine.folder / "tmp", machine.state_dir / "spool")
    return {str(path) for place in places for path in place.rglob("*")}


def everything() -> set[int]:
    """Pids of every living process of this machine."""
    return {p.pid for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE}


def test_a_lane_told_to_end_cancels_its_calls_on_the_server(machine: Machine) -> None:
    up(machine, *ENDLESS)
    enqueue(machine)
    until(lambda: running_calls(machine) == 12)
    lane = psutil.Process(machine.state["processes"]["short"]["pid"])
    lane.terminate()
    lane.wait(GRACE_S + SLACK_S)
    until(lambda: running_calls(machine) == 0)
    # and its supervisor starts it again, which takes up what it gave back
    until(lambda: running_calls(machine) == 12, within_s=60)
    assert machine.producer("down").returncode == 0


def test_down_in_mid_job_leaves_no_process_no_port_and_no_file_and_the_next_up_ends_the_job(
    machine: Machine,
) -> None:
    files = around(machine)
    before = everything()
    up(machine, *ENDLESS)
    enqueue(machine)
    until(lambda: running_calls(machine) == 12)
    pids, ports = {process.pid for process in machine.processes()}, machine.ports()
    assert len(pids) == 7
    assert len(ports) == 2
    down = machine.producer("down")
    assert down.returncode == 0, down.stderr
    assert down.stderr.splitlines()[-1] == "all stopped"
    assert not pids & everything()
    assert machine.processes() == []
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not ports & listening
    assert around(machine) == files
    # whatever began meanwhile and mentions this folder would be ours
    for pid in everything() - before:
        try:
            assert str(machine.folder) not in " ".join(psutil.Process(pid).cmdline())
        except psutil.NoSuchProcess:
            continue
    up(machine)
    finish(machine)
    assert machine.producer("down").returncode == 0


def finish(machine: Machine) -> None:
    """The run ends by itself with every sample stored."""

    def done() -> bool:
        said = json.loads(machine.producer("status", "--json", "--output-dir", "eyas-data").stdout)
        return bool(said["finished"])

    until(done, within_s=100)
    verified = machine.storage("verify", "eyas-data")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "12" in verified.stdout


@pytest.mark.slow
def test_sigterm_to_each_process_in_turn_loses_nothing(machine: Machine) -> None:
    up(machine, "--engine-pace-tpot-ms", "300")
    enqueue(machine)
    for name in ("short", "sink", "capture", "engine", "redis", "long"):
        until(lambda name=name: machine.state["processes"][name]["state"] == "ready", within_s=90)
        process = psutil.Process(machine.state["processes"][name]["pid"])
        process.terminate()
        process.wait(GRACE_S + SLACK_S)
    finish(machine)
    assert machine.producer("down").returncode == 0
    assert machine.processes() == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_enqueue_and_watch_end_at_a_signal_and_leave_no_file(machine: Machine, how: signal.Signals) -> None:
    up(machine, *ENDLESS)
    files = around(machine)
    rows = "".join(json.dumps({"prompt": f"row {n} " + "word " * 50}) + "\n" for n in range(100_000))
    (machine.folder / "many.jsonl").write_text(rows)
    log = machine.folder / "enqueue.log"
    enqueuing = machine.start("enqueue", "--manifest", "many.jsonl", "--no-watch", log=log)
    until(lambda: "tokenize" in log.read_text(), within_s=60)
    enqueuing.send_signal(how)
    assert enqueuing.wait(timeout=GRACE_S + SLACK_S) == 130
    assert log.read_text().splitlines()[-1] == "interrupted"
    watching = machine.start("watch", log=machine.folder / "watch.log")
    until(lambda: (machine.folder / "watch.log").stat().st_size > 0, within_s=60)
    watching.send_signal(how)
    assert watching.wait(timeout=GRACE_S + SLACK_S) in (0, 130)
    assert machine.producer("down").returncode == 0
    assert around(machine) == files


def test_a_second_signal_ends_a_command_at_once() -> None:
    script = (
        "import click, signal, sys, time\n"
        "from storage.cli_errors import run_command\n"
        "@click.command()\n"
        "def slow():\n"
        "    try:\n"
        "        print('began', flush=True); time.sleep(600)\n"
        "    finally:\n"
        "        print('cleaning', flush=True); time.sleep(600)\n"
        "sys.exit(run_command(slow, 'slow', []))\n"
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == "began\n"
        process.send_signal(signal.SIGTERM)
        assert said.readline() == "cleaning\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=SLACK_S) == -signal.SIGINT
