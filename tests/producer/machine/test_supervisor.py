"""The supervisor over small real processes: starts in order, restarts what is killed, leaves nothing."""

import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from producer.machine.children import Child
from producer.machine.processes import identity
from producer.machine.supervisor import LONGEST_DELAY_S, Supervisor
from producer.machine.take_down import take_down
from producer.machine.up_state import Service, ServiceReport, StateFolder, UpState
from storage.errors import UnsuitableError
from tests.producer.machine.supervised import Supervised, pid_of, plan, service, until


def test_a_service_starts_only_after_those_it_needs_are_ready(supervised: Supervised) -> None:
    supervised.start(service("second", after=("first",)), service("first"))
    until(supervised.is_up)
    started = {name: psutil.Process(pid_of(supervised, name)).create_time() for name in ("first", "second")}
    assert started["second"] > started["first"]
    assert supervised.state.processes["first"].ready_s is not None


def test_the_state_file_is_for_its_owner_only(supervised: Supervised) -> None:
    supervised.start(service("one"))
    until(supervised.is_up)
    for name in ("up.json", "plan.json"):
        assert stat.S_IMODE((supervised.folder.path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(supervised.folder.path.stat().st_mode) == 0o700


def test_what_redis_writes_is_for_its_owner_only_in_an_open_folder_too(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder = StateFolder(tmp_path)
    folder.redis.mkdir(mode=0o755)
    folder.create()
    assert stat.S_IMODE(folder.redis.stat().st_mode) == stat.S_IMODE(folder.logs.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder to another user")
def test_the_state_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 12345, -1)
    with pytest.raises(UnsuitableError, match="belongs to another user"):
        StateFolder(tmp_path / "state").create()


def test_what_is_killed_runs_again_and_its_children_are_gone(supervised: Supervised) -> None:
    supervised.start(service("one"))
    until(supervised.is_up)
    before = psutil.Process(pid_of(supervised, "one"))
    (child,) = before.children()
    before.kill()
    until(lambda: supervised.state.processes["one"].restarts == 1)
    until(lambda: supervised.state.processes["one"].state == "ready")
    assert pid_of(supervised, "one") != before.pid
    until(lambda: not child.is_running())


@pytest.mark.slow
def test_a_service_that_dies_again_and_again_is_started_ever_more_rarely(supervised: Supervised) -> None:
    supervised.start(service("one"))
    until(supervised.is_up)
    delays = []
    for death in range(1, 5):
        dying = psutil.Process(pid_of(supervised, "one"))
        dying.kill()
        until(lambda death=death: supervised.state.processes["one"].restarts == death)
        died_at = (supervised.folder.path / "up.json").stat().st_mtime
        until(lambda dying=dying: pid_of(supervised, "one") != dying.pid)
        delays.append(psutil.Process(pid_of(supervised, "one")).create_time() - died_at)
        until(lambda: supervised.state.processes["one"].state == "ready")
    assert delays[3] > delays[0] + 0.5


def test_stopping_leaves_no_process_no_spool_and_no_state(supervised: Supervised) -> None:
    supervised.start(service("one"), service("two", stops=1), service("three", stops=2))
    until(supervised.is_up)
    spool = supervised.folder.path / "spool"
    spool.mkdir()
    (spool / "left").write_bytes(b"x")
    assert len(supervised.marked()) == 7
    assert take_down(supervised.folder)
    until(supervised.ended)
    assert supervised.marked() == []
    assert not spool.exists()
    left = {entry.name for entry in supervised.folder.path.iterdir()}
    assert left == {"lock", "logs", "redis"}


def test_stages_stop_one_after_the_other(supervised: Supervised) -> None:
    supervised.start(service("lane"), service("redis", stops=2))
    until(supervised.is_up)
    lane, redis = psutil.Process(pid_of(supervised, "lane")), psutil.Process(pid_of(supervised, "redis"))
    lane.suspend()  # cannot heed SIGTERM: the stage waits for it
    os.kill(supervised.process.pid, signal.SIGTERM)
    until(lambda: supervised.state.phase == "stopping")
    assert redis.status() != psutil.STATUS_ZOMBIE
    lane.resume()
    until(supervised.ended)
    assert supervised.marked() == []


def test_the_end_of_the_terminal_changes_nothing(supervised: Supervised) -> None:
    supervised.start(service("one"))
    until(supervised.is_up)
    before = pid_of(supervised, "one")
    os.kill(supervised.process.pid, signal.SIGHUP)
    supervised.folder.write_plan(supervised.folder.read_plan())
    os.kill(supervised.process.pid, signal.SIGUSR1)
    until(supervised.is_up)
    assert pid_of(supervised, "one") == before


def test_what_fails_to_join_leaves_the_rest_alone_and_may_be_tried_again(supervised: Supervised) -> None:
    first = service("one")
    supervised.start(first)
    until(supervised.is_up)
    before = pid_of(supervised, "one")

    def ask(second: Service, number: int) -> None:
        supervised.folder.write_plan(plan(supervised.folder, first, second, number=number))
        os.kill(supervised.process.pid, signal.SIGUSR1)
        until(lambda: supervised.state.plan_number == number and supervised.is_up())

    ask(replace(service("two"), arguments=("/no/such/program",)), 2)
    assert supervised.state.processes["two"].state == "failed"
    assert "could not be started" in supervised.state.processes["two"].said
    ask(service("two"), 3)
    assert supervised.state.processes["two"].state == "ready"
    assert pid_of(supervised, "one") == before


def test_the_end_of_the_owner_takes_everything_along(supervised: Supervised) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    supervised.start(service("one"), owner=identity(owner.pid))
    until(supervised.is_up)
    owner.kill()
    owner.wait()
    until(supervised.ended)
    assert supervised.marked() == []


def test_a_service_that_cannot_start_fails_the_whole_and_leaves_nothing(supervised: Supervised) -> None:
    wrong = Service(
        name="wrong",
        arguments=(sys.executable, "-c", "raise SystemExit('no such thing')"),
        environment={},
        check="http",
        target="http://127.0.0.1:1/",
        address="",
    )
    supervised.start(service("one"), wrong)
    until(supervised.ended)
    state = supervised.state
    assert state.phase == "failed"
    assert state.error == "wrong ended with status 1 before it was ready"
    assert "no such thing" in supervised.folder.log("wrong").read_text()
    assert supervised.marked() == []


def test_a_service_that_is_always_killed_before_it_is_ready_fails_the_whole(supervised: Supervised) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    supervised.start(replace(service("one"), arguments=(sys.executable, "-c", killed)))
    until(supervised.ended)
    assert supervised.state.error == "one was killed by SIGKILL before it was ready"
    assert supervised.marked() == []


def test_a_killed_supervisor_leaves_orphans_that_are_found_and_nothing_else_is_touched(
    supervised: Supervised,
) -> None:
    supervised.start(service("one"), service("two"))
    until(supervised.is_up)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    supervised.process.kill()
    supervised.process.wait()
    assert len(supervised.marked()) == 4
    # the number of a process that ended long ago, now somebody else's
    state = supervised.state
    state.processes["two"].pid = bystander.pid
    supervised.folder.write_state(state)
    try:
        assert take_down(supervised.folder)
        assert supervised.marked() == []
        assert bystander.poll() is None
        assert supervised.folder.read_state() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_service_that_died_at_once_all_night_is_tried_on_and_takes_nobody_along(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.create()
    one = service("one")
    state = UpState(token="t", pid=1, started="s", host="h", phase="up", up_once=True)
    supervisor = Supervisor(folder=folder, plan=plan(folder, one), state=state)
    child = Child(service=one, report=ServiceReport(), was_ready=True, deaths=2000)
    child.started_at = time.monotonic()
    supervisor._died(child, 1)
    assert child.report.state == "restarting"
    assert 0 < child.start_at - child.started_at < LONGEST_DELAY_S + 5


def test_a_second_supervisor_gives_way(supervised: Supervised) -> None:
    supervised.start(service("one"))
    until(supervised.is_up)
    second = subprocess.run(
        [sys.executable, "-m", "producer.machine.supervisor", str(supervised.folder.path)],
        env={**os.environ, "EYAS_UP": "other"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )
    assert second.returncode == 3
    assert supervised.is_up()
