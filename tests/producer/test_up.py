"""`up` and `down` with the real Redis, lanes, sink, engine and Flower."""

import base64
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
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
    starting = machine.start("up", "--engine", *ANY_PORT, log=log)
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


def ask(url: str, login: str | None = None) -> tuple[int, bytes]:
    """Status and body of a GET, with `name:password`."""
    request = urllib.request.Request(url)
    if login:
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_flower_asks_for_its_login_and_shows_no_prompt_and_no_secret(machine: Machine) -> None:
    up = machine.up("--engine")
    assert up.returncode == 0, up.stderr
    state = machine.state
    name, _, password = state["flower_login"].partition(":")
    assert (
        f"Flower's login: {name}, password {password} (kept in {machine.state_dir / 'up.json'})" in up.stderr
    )
    assert stat.S_IMODE((machine.state_dir / "up.json").stat().st_mode) == 0o600
    assert password not in machine.up("--engine").stderr
    flower = state["flower_url"]
    assert ask(f"{flower}/tasks")[0] == ask(f"{flower}/api/workers", f"{name}:wrong")[0] == 401
    words = "the quick brown fox has a secret"
    (machine.folder / "p.jsonl").write_text(json.dumps({"prompt": words}) + "\n")
    machine.environment["EYAS_SERVER_API_KEY"] = "key-of-the-server"
    enqueue = machine.producer("enqueue", "--manifest", "p.jsonl", "--short-max-tokens", "8")
    assert enqueue.returncode == 0, enqueue.stderr

    def tasks() -> bytes:
        return ask(f"{flower}/api/tasks", state["flower_login"])[1]

    until(lambda: b"generate.short" in tasks() and b"stored" in tasks(), within_s=60)
    redis_password = state["redis_url"].partition("redis://:")[2].partition("@")[0]
    worker = next(iter(json.loads(ask(f"{flower}/api/workers?refresh=1", state["flower_login"])[1])))
    for path in ("workers", "tasks", "broker", "api/tasks", "api/workers", f"worker/{worker}"):
        status, body = ask(f"{flower}/{path}", state["flower_login"])
        assert status == 200, path
        for hidden in (redis_password, "quick brown", "key-of-the-server"):
            assert hidden.encode() not in body, path
    for process in machine.processes():
        assert password not in " ".join(process.cmdline())
    assert machine.producer("down").returncode == 0


def test_flower_without_a_login_is_a_choice(machine: Machine) -> None:
    help_text = " ".join(machine.producer("up", "--help").stdout.split())
    assert (
        "Without one everybody on this machine can see and stop the workers. [env var: EYAS_FLOWER_LOGIN"
        in help_text
    )
    up = machine.up("--no-flower-login")
    assert up.returncode == 0, up.stderr
    assert "Flower's login" not in up.stderr
    assert ask(f"{machine.state['flower_url']}/tasks")[0] == 200
    assert machine.producer("down").returncode == 0


def test_down_ends_what_runs_also_when_the_state_file_is_gone(machine: Machine) -> None:
    assert machine.up("--no-flower").returncode == 0
    ports = machine.ports()
    (machine.state_dir / "up.json").unlink()
    (machine.state_dir / "plan.json").unlink()
    down = machine.producer("down")
    assert down.returncode == 0
    assert "up.json` is gone, but 6 processes it told of still run: stopping them" in down.stderr
    assert machine.processes() == []
    assert all(is_free(port) for port in ports)


def test_a_folder_nobody_can_write_to_is_refused_before_anything_starts(machine: Machine) -> None:
    (machine.folder / "file").write_text("")
    up = machine.up("--output-dir", "file/run")
    assert up.returncode == 2
    assert up.stderr == (
        f"error: `--output-dir {machine.folder}/file/run`: `{machine.folder}/file` is no folder\n\n"
        "hint: name another folder with `--output-dir`\n"
    )
    assert machine.processes() == []
    assert not machine.state_dir.exists()


def test_two_ups_and_a_down_at_once_leave_nothing(machine: Machine) -> None:
    first, second, down = (machine.folder / name for name in ("first", "second", "down"))
    starting = machine.start("up", "--no-flower", log=first)
    until(lambda: (machine.state_dir / "plan.json").exists())
    other = machine.start("up", "--no-flower", log=second)
    until(lambda: "waiting for `producer up` (pid" in second.read_text())
    stopping = machine.start("down", log=down)
    until(lambda: "waiting for `producer up` (pid" in down.read_text())
    assert [process.wait(timeout=100) for process in (starting, other, stopping)] == [0, 0, 0]
    # whichever of the two that waited came first: nothing is up, or what the second started is
    machine.producer("down")
    assert machine.processes() == []
    assert not (machine.state_dir / "up.json").exists()


def assert_only_we_may_use_redis(machine: Machine) -> None:
    url = machine.state["redis_url"]
    password = url.partition("redis://:")[2].partition("@")[0]
    assert len(password) >= 24
    for process in machine.processes():
        assert password not in " ".join(process.cmdline())
    listening = [
        connection.laddr.ip
        for process in machine.processes()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}
    settings = machine.state_dir / "redis" / "redis.conf"
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    with redis.Redis.from_url(url) as ours:
        assert ours.config_get("protected-mode")["protected-mode"] == "yes"
        assert ours.config_get("bind")["bind"] == "127.0.0.1"
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
