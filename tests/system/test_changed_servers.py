"""A server that becomes another one in mid-run: it is stopped, not the run; nothing of it is stored."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_process import Engine, running_engine

import storage
from storage.store import Store
from tests.system.machine import Machine, machine_in
from tests.system.prompts import write_prompts
from workers.engine import tiny_model_dir

pytestmark = pytest.mark.slow
PROMPTS = 160
SLOW = ("--pace-ttft-ms", 400, "--mean-tokens", 12)
"""So that a run is still at work when its server has come back."""


class Servers:
    """Two engines of one model on this machine, each of which can be replaced."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._options = (*SLOW, "--node", "here", "--spool-dir", folder / "spool")
        self.one, self.other = self.start(), self.start()

    def start(self, *options: object, port: int = 0) -> Engine:
        given = {"--port": port} if port else {}
        return self._stack.enter_context(
            running_engine(*self._options, *options, *(part for pair in given.items() for part in pair))
        )

    def replace_one(self, *options: object) -> None:
        """Kill it and start another on its port."""
        self.one.process.kill()
        self.one.process.wait()
        self.one = self.start(*options, port=int(self.one.url.rsplit(":", 1)[1]))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with machine_in(tmp_path) as machine:
        machine.environment |= {"EYAS_NODE": "here", "EYAS_SPOOL_DIR": str(tmp_path / "spool")}
        up = machine.up("--no-flower")
        assert up.returncode == 0, up.stderr
        yield machine
        assert machine.producer("down").returncode == 0


def status(machine: Machine) -> dict[str, Any]:
    said = machine.producer("status", "--json")
    assert said.stdout, said.stderr
    content: dict[str, Any] = json.loads(said.stdout)
    return content


def server(machine: Machine, url: str) -> dict[str, Any]:
    (found,) = (one for one in status(machine)["servers"] if one["url"] == url)
    return dict(found)


def until(condition: Callable[[], Any], what: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.2)


def other_model(folder: Path) -> tuple[object, ...]:
    shutil.copytree(tiny_model_dir(), folder / "another-llama")
    return ("--model", folder / "another-llama")


CHANGES = {
    "model": (other_model, ("serves `", "another-llama`", "--model-path ")),
    "kv": (lambda _: ("--kv-cache-dtype", "fp8_e4m3"), ("`fp8_e4m3`", "--kv-cache-dtype bf16")),
    "weights": (
        lambda _: ("--weight-version", "step-2"),
        ("weights `default` → `step-2`", "`producer enqueue`"),
    ),
}


@pytest.mark.parametrize("change", ["weights", "model", "kv"])
def test_a_changed_server_is_stopped_the_other_goes_on_and_the_old_one_is_used_again(
    machine: Machine, tmp_path: Path, change: str
) -> None:
    options, said = CHANGES[change]
    write_prompts(tmp_path / "p.jsonl", PROMPTS)
    with ExitStack() as stack:
        servers = Servers(tmp_path, stack)
        first, second = servers.one.url, servers.other.url
        enqueued = machine.producer(
            *("enqueue", "--manifest", "p.jsonl", "--output-dir", "out", "--short-max-tokens", "16"),
            *("--server-url", first, "--server-url", second),
            *("--short-concurrency", "3", "--capture-concurrency", "2"),
        )
        assert enqueued.returncode == 0, enqueued.stderr
        until(lambda: status(machine)["done"] >= 5, "both are at work")
        before = {path.stem for path in (tmp_path / "out" / "facts").iterdir()}

        servers.replace_one(*options(tmp_path))
        until(lambda: server(machine, first)["state"] == "unsuitable", "the change is known")
        reason = server(machine, first)["reason"]
        assert all(part in reason for part in said), reason
        assert server(machine, second)["state"] == "up"
        done = status(machine)["done"]
        until(lambda: status(machine)["done"] > done + 5, "the other goes on")

        servers.other.process.kill()
        until(lambda: server(machine, second)["state"] == "away", "nobody is left")
        # What is on its way is done; after that nothing can be, though the changed one answers.
        until(lambda: not any(lane["in_flight"] for lane in status(machine)["lanes"]), "nothing runs")
        assert server(machine, first)["state"] == "unsuitable"
        assert status(machine)["done"] < PROMPTS

        servers.replace_one()
        watched = machine.producer("watch")
        assert watched.returncode == 0, watched.stdout + watched.stderr
        assert server(machine, first)["state"] == "up"
        verified = machine.storage("verify", "out")
        assert verified.returncode == 0, verified.stdout + verified.stderr

    assert len(storage.open(tmp_path / "out")) == PROMPTS
    store = Store.open(tmp_path / "out")
    made_by = {store.response(prompt.id).facts_id for prompt in store.prompts("p")}
    assert made_by <= before
    for name in made_by:
        kept = json.loads((tmp_path / "out" / "facts" / f"{name}.json").read_text())
        assert (kept["weight_version"], kept["kv_cache_dtype"]) == ("default", "bfloat16")
        assert Path(kept["model"]) == tiny_model_dir()


def test_a_person_who_enqueues_again_agrees_to_the_change(machine: Machine, tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 100)
    with ExitStack() as stack:
        servers = Servers(tmp_path, stack)
        url = servers.one.url
        job = ("enqueue", "--manifest", "p.jsonl", "--output-dir", "out", "--short-max-tokens", "16")
        assert machine.producer(*job, "--server-url", url, "--short-concurrency", "2").returncode == 0
        until(lambda: status(machine)["done"] >= 2, "it is at work")
        servers.replace_one("--weight-version", "step-2")
        until(lambda: server(machine, url)["state"] == "unsuitable", "the change is known")
        again = machine.producer(*job)
        assert again.returncode == 0, again.stderr
        assert "changed (weights `default` → `step-2`); from now on the run uses it" in again.stderr
        watched = machine.producer("watch")
        assert watched.returncode == 0, watched.stdout + watched.stderr
    store = Store.open(tmp_path / "out")
    facts = {store.response(prompt.id).facts_id for prompt in store.prompts("p")}
    kept = [json.loads((tmp_path / "out" / "facts" / f"{name}.json").read_text()) for name in facts]
    assert {one["weight_version"] for one in kept} == {"default", "step-2"}
