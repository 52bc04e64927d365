"""`up` and `down` with the real Redis, lanes, sink, engine and Flower."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.producer.machine.supervised import until
from tests.system.machine import Machine, machine_in

ANY_PORT = ("--flower-port", "0", "--engine-port", "0")
SERVICES = ("redis", "engine", "short", "long", "capture", "sink", "flower")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with machine_in(tmp_path) as it:
        yield it


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_up_brings_everything_up_and_down_leaves_nothing(machine: Machine) -> None:
    log = machine.folder / "log"
    began = time.monotonic()
    starting = machine.start("up", "--engine", *ANY_PORT, log=log)
    until(lambda: log.stat().st_size > 0)
    assert time.monotonic() - began < 1.0
    assert starting.wait(timeout=100) == 0, log.read_text()
    assert log.read_text().startswith("starting redis, engine, short, long, capture, sink, flower")
    assert tuple(machine.state["processes"]) == SERVICES
    assert {report["state"] for report in machine.state["processes"].values()} == {"ready"}
    assert_only_we_may_use_redis(machine)

    ports = machine.ports()
    assert len(ports) == 3
    again = machine.up("--engine")
    assert again.returncode == 0
    assert again.stderr.startswith("already up: redis, engine, short")
    for port in ports:
        assert f"127.0.0.1:{port}" in again.stdout

    moved = machine.up("--engine", "--output-dir", "elsewhere")
    assert "--output-dir cannot change while it is up: `producer down` first" in moved.stderr

    down = machine.producer("down")
    assert down.returncode == 0, down.stderr
    assert machine.processes() == []
    assert all(is_free(port) for port in ports)
    assert list((machine.folder / "tmp").iterdir()) == []
    left = {str(p.relative_to(machine.state_dir)) for p in machine.state_dir.rglob("*") if p.is_file()}
    assert {name for name in left if not name.startswith(("logs/", "redis/appendonlydir/"))} == {
        "lock",
        "up.lock",
    }
    assert machine.producer("down").stderr == "nothing is up\n"


def assert_only_we_may_use_redis(machine: Machine) -> None:
    url = machine.state["redis_url"]
    password = url.partition("redis://:")[2].partition("@")[0]
    assert len(password) >= 24
    for process in machine.processes():
        assert password not in " ".join(process.cmdline())
    stranger = redis.Redis.from_url(url.replace(f":{password}@", ""))
    with stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


@pytest.mark.slow
def test_each_process_that_is_killed_is_ready_again(machine: Machine) -> None:
    assert machine.up("--engine").returncode == 0
    for name in SERVICES:
        report = machine.state["processes"][name]
        os.kill(report["pid"], signal.SIGKILL)
    for name in SERVICES:
        until(lambda name=name: machine.state["processes"][name]["restarts"] == 1)
    for name in SERVICES:
        until(lambda name=name: machine.state["processes"][name]["state"] == "ready", within_s=60)
    assert machine.producer("down").returncode == 0
    assert machine.processes() == []


@pytest.mark.slow
def test_what_a_killed_supervisor_left_is_ended_by_the_next_up_and_the_engine_may_join_later(
    machine: Machine,
) -> None:
    assert machine.up("--no-flower").returncode == 0
    orphans = [p for p in machine.processes() if p.pid != machine.state["pid"]]
    assert len(orphans) >= 5
    os.kill(machine.state["pid"], signal.SIGKILL)
    again = machine.up("--no-flower")
    assert again.returncode == 0, again.stderr
    assert "the supervisor was gone; ended" in again.stderr
    assert not any(orphan.is_running() for orphan in orphans)

    before = {name: report["pid"] for name, report in machine.state["processes"].items()}
    added = machine.up("--no-flower", "--engine")
    assert added.returncode == 0, added.stderr
    assert "starting engine" in added.stderr
    after = {name: report["pid"] for name, report in machine.state["processes"].items()}
    assert after.pop("engine")
    assert after == before
    assert machine.state["engine_url"].startswith("http://127.0.0.1:")
    assert machine.producer("down").returncode == 0
    assert machine.processes() == []


def test_ctrl_c_while_starting_leaves_nothing(machine: Machine) -> None:
    starting = subprocess.Popen(
        [sys.executable, "-m", "producer.cli", "up", "--no-flower"],
        cwd=machine.folder,
        env=machine.environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert starting.stderr is not None
    until(lambda: starting.stderr.readline().startswith("redis ready"))
    starting.send_signal(signal.SIGINT)
    assert starting.wait(timeout=60) == 130
    starting.stderr.close()
    assert machine.processes() == []


def test_a_redis_that_is_named_but_not_there_is_an_error(machine: Machine) -> None:
    up = machine.up("--redis-url", "redis://127.0.0.1:1/0")
    assert up.returncode == 3
    assert up.stderr.startswith("error: no Redis answers at `redis://127.0.0.1:1/0`")
    assert machine.processes() == []


def test_a_service_that_cannot_start_says_what_was_wrong_and_not_its_hint(machine: Machine) -> None:
    machine.environment["EYAS_SPOOL_DIR"] = str(machine.folder / "file")
    (machine.folder / "file").write_text("")
    up = machine.up("--engine", "--no-flower", *ANY_PORT)
    assert up.returncode == 3
    error = up.stderr.partition("error: ")[2].partition("\n")[0]
    assert "spool" in error
    assert "--help" not in error
    assert machine.processes() == []
