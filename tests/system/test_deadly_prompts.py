"""A prompt that kills the server: found after few deaths, and nothing beside it is blamed for them."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from producer.machine.redis_server import free_port
from storage.sample import Failure, Stage
from storage.store import Store
from tests.producer.machine.supervised import until
from tests.system.machine import ROOT, Machine, machine_in

JOB = ("--manifest", "datasets.toml", "--output-dir", "out", "--short-max-tokens", "48")
AT_ONCE = ("--short-concurrency", "24", "--long-concurrency", "8", "--capture-concurrency", "12")


class Supervised:
    """A deadly engine that is started again each time it has died."""

    def __init__(self, folder: Path, kills: Sequence[dict[str, str]], machine: Machine) -> None:
        self.deaths = 0
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        (folder / "kills.json").write_text(json.dumps(kills))
        self._command = [sys.executable, "-m", "tests.system.deadly_engine", str(folder / "kills.json")]
        self._command += ["--port", str(port), "--pace-ttft-ms", "400", "--pace-tpot-ms", "5"]
        self._environment = machine.environment | {"EYAS_SPOOL_DIR": str(folder / "spool")}
        self._log = folder / "engine.log"
        self._over = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, cwd=ROOT, env=self._environment, stderr=log)

    def _keep(self) -> None:
        while not self._over.is_set():
            self._process.wait()
            if not self._over.is_set():
                self.deaths += 1
                self._process = self._start()

    def end(self) -> None:
        self._over.set()
        self._process.kill()
        self._thread.join()
        self._process.kill()
        self._process.wait()


@contextmanager
def supervised(folder: Path, kills: Sequence[dict[str, str]], machine: Machine) -> Iterator[Supervised]:
    engine = Supervised(folder, kills, machine)
    try:
        yield engine
    finally:
        engine.end()


def write_dataset(folder: Path, name: str, texts: Sequence[str], lane: str) -> None:
    lines = [json.dumps({"prompt": text}) for text in texts]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    with (folder / "datasets.toml").open("a") as manifest:
        manifest.write(f'[[dataset]]\nname = "{name}"\nsource = "file:{name}.jsonl"\nlane = "{lane}"\n')


def prompts(count: int, killers: dict[int, str]) -> list[str]:
    return [f"What is {n} plus {n * 7 % 13}? {killers.get(n, f'Explain step {n}')}." for n in range(count)]


@dataclass(frozen=True)
class Ended:
    """A job that has ended with dead letters, and what became of them on a server without the defect."""

    deaths: int
    failures: list[Failure]
    stored: list[int]
    """Samples of each dataset."""
    stored_after_retry: list[int]


def run_job(folder: Path, kills: Sequence[dict[str, str]]) -> Ended:
    """Run it, then mend the server and try the dead letters again."""
    with machine_in(folder) as machine, supervised(folder, kills, machine) as engine:
        machine.environment |= {"EYAS_SPOOL_DIR": str(folder / "spool")}
        up = machine.up("--no-flower")
        assert up.returncode == 0, up.stderr
        enqueued = machine.producer("enqueue", *JOB, *AT_ONCE, "--server-url", engine.url)
        assert enqueued.returncode == 0, enqueued.stderr
        watching = machine.start("watch", log=folder / "watch.log")
        assert watching.wait(timeout=280) == 1, (folder / "watch.log").read_text()
        status = json.loads(machine.producer("status", "--json").stdout)
        failures = list(Store.open(folder / "out").failures())
        deaths = engine.deaths
        listed = json.loads(machine.producer("status", "--failed", "--json").stdout)
        assert listed["codes"] == {"prompt.kills_server": len(kills)}

        (folder / "kills.json").write_text("[]")
        again = machine.producer("retry", "--code", "prompt.kills_server")
        assert again.stdout == f"{len(kills)} will be tried again (prompt.kills_server {len(kills)})\n"
        until(lambda: not json.loads(machine.producer("status", "--json").stdout)["finished"])
        watching = machine.start("watch", log=folder / "watch2.log")
        assert watching.wait(timeout=60) == 0, (folder / "watch2.log").read_text()
        after = json.loads(machine.producer("status", "--json").stdout)
        verified = machine.storage("verify", "out")
        assert verified.returncode == 0, verified.stdout
        assert machine.producer("down").returncode == 0
    assert engine.deaths == deaths
    return Ended(
        deaths=deaths,
        failures=failures,
        stored=[dataset["stored"] for dataset in status["datasets"]],
        stored_after_retry=[dataset["stored"] for dataset in after["datasets"]],
    )


def most_deaths(in_flight: int) -> int:
    """Two that mark, one for each fifth of a fifth, and two alone."""
    fifths = 0
    while in_flight > 1:
        in_flight, fifths = in_flight // 5, fifths + 1
    return 2 + fifths + 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_deadly_prompt_among_two_hundred_is_the_only_dead_letter(tmp_path: Path) -> None:
    write_dataset(tmp_path, "B1", prompts(200, {30: "Say the deadly word"}), "short")
    ended = run_job(tmp_path, [{"words": "the deadly word", "when": "generate"}])
    sys.stdout.write(f"server deaths: {ended.deaths}\n")
    assert [(f.code, f.stage) for f in ended.failures] == [("prompt.kills_server", Stage.GENERATE)]
    assert (ended.stored, ended.stored_after_retry) == ([199], [200])
    assert ended.deaths <= most_deaths(in_flight=24)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_deadly_prompts_of_every_lane_and_stage_end_and_nothing_else_does(tmp_path: Path) -> None:
    killers = {10: "Say the deadly word", 77: "Keep the deadly state"}
    write_dataset(tmp_path, "B1", prompts(100, killers), "short")
    write_dataset(tmp_path, "B2", prompts(40, {5: "Say the deadly phrase"}), "long")
    ended = run_job(
        tmp_path,
        [
            {"words": "the deadly word", "when": "generate"},
            {"words": "the deadly phrase", "when": "generate"},
            {"words": "the deadly state", "when": "capture"},
        ],
    )
    sys.stdout.write(f"server deaths: {ended.deaths}\n")
    found = sorted((f.dataset, f.stage.value, f.code) for f in ended.failures)
    assert found == [
        ("B1", "capture", "prompt.kills_server"),
        ("B1", "generate", "prompt.kills_server"),
        ("B2", "generate", "prompt.kills_server"),
    ]
    assert (ended.stored, ended.stored_after_retry) == ([98, 39], [100, 40])
    assert ended.deaths <= 3 * most_deaths(in_flight=24 + 8 + 12)
