"""Worker, sink and producer killed over and over while a job runs: the store is as if nothing had been.

The moments are drawn from a seed, which the test prints (`pytest -rP`); `EYAS_KILL_SEED` draws others.
"""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import storage
from tests.producer.machine.supervised import until
from tests.system.machine import Machine, machine_in
from tests.system.prompts import write_prompts
from workers.board.presence import glance

OURS = {"short": 12, "capture": 8, "sink": 8, "enqueue": 8}
EVERYTHING = {"redis": 3, "engine": 3, "short": 2, "long": 1, "capture": 2, "sink": 2, "enqueue": 2}
"""Victim → how often."""
PROMPTS = 500
SEED = int(os.environ.get("EYAS_KILL_SEED", "20"))
JOB = ("--manifest", "b1.jsonl", "--output-dir", "out", "--short-max-tokens", "64", "--seed", "7")
FINISHES_WITHIN_S = 420
FEW_AT_ONCE = ("--short-concurrency", "10", "--capture-concurrency", "6")
"""So that the job outlasts the kills, and each finds calls in flight."""
PACE = ("--engine-pace-ttft-ms", "1000", "--engine-pace-tpot-ms", "10")


@dataclass(frozen=True)
class Stored:
    """A sample as a reader sees it."""

    tokens: bytes
    states: bytes
    shape: tuple[int, ...]


def read_store(folder: Path) -> dict[bytes, Stored]:
    samples = storage.open(folder)
    assert len(set(samples.ids)) == len(samples.ids)
    found = {}
    for sample_id in samples.ids:
        sample = samples.sample(sample_id)
        found[sample_id] = Stored(
            tokens=np.asarray(sample.tokens).tobytes(),
            states=np.asarray(sample.states).tobytes(),
            shape=tuple(sample.states.shape),
        )
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[bytes, Stored]:
    """What an undisturbed run stores."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_prompts(folder / "b1.jsonl", PROMPTS)
    with machine_in(folder) as machine:
        up = machine.up("--engine", "--no-flower")
        assert up.returncode == 0, up.stderr
        enqueued = machine.producer("enqueue", *JOB)
        assert enqueued.returncode == 0, enqueued.stderr
        wait_for_the_end(machine)
        assert machine.producer("down").returncode == 0
    stored = read_store(folder / "out")
    assert len(stored) == PROMPTS
    return stored


def wait_for_the_end(machine: Machine) -> None:
    watching = machine.start("watch", log=machine.folder / "watch.log")
    try:
        assert watching.wait(timeout=FINISHES_WITHIN_S) == 0, (machine.folder / "watch.log").read_text()
    finally:
        watching.kill()
        watching.wait()


class Killer:
    """Kills one process after the other, each at a random moment at which it has work in its hands."""

    def __init__(self, machine: Machine, dice: random.Random) -> None:
        self.machine = machine
        self.dice = dice
        self.held = 0
        """Calls and results that were in the victims' hands, over all kills."""
        self.enqueueing: subprocess.Popen[bytes] | None = None

    def kill(self, victim: str) -> None:
        time.sleep(self.dice.uniform(0.0, 2.0))
        if victim == "enqueue":
            self.kill_enqueue()
        else:
            self.kill_service(victim)

    def kill_service(self, name: str) -> None:
        deadline = time.monotonic() + 90
        while not (held := self.held_by(name)):
            assert time.monotonic() < deadline, f"{name} had nothing in its hands for 90 s"
            # of itself too: whoever enqueues was killed, perhaps before it had published anything
            self.enqueue()
            time.sleep(0.02)
        os.kill(self.machine.state["processes"][name]["pid"], signal.SIGKILL)
        self.held += held

    def kill_enqueue(self) -> None:
        self.enqueue()
        assert self.enqueueing is not None
        time.sleep(self.dice.uniform(0.0, 2.0))
        while self.enqueueing.poll() is not None:
            self.enqueue()
        self.enqueueing.kill()
        self.enqueueing.wait()

    def held_by(self, name: str) -> int:
        """What the victim has in its hands, if it is ready; of what all calls go through, all of them."""
        report = self.machine.state["processes"][name]
        seen = glance(self.machine.state["redis_url"])
        if report["state"] != "ready" or seen is None:
            return 0
        assert not (seen.carried and seen.carried.finished), "the job was over before the kills"
        everybody = name in ("redis", "engine", "long")  # no prompt here is of lane `long`
        return sum(p.in_flight for p in seen.processes if everybody or p.pid == report["pid"])

    def enqueue(self) -> None:
        if self.enqueueing is None or self.enqueueing.poll() is not None:
            self.enqueueing = self.machine.start(
                "enqueue", *JOB, *FEW_AT_ONCE, log=self.machine.folder / "enqueue.log"
            )

    def stop(self) -> None:
        if self.enqueueing is not None:
            self.enqueueing.kill()
            self.enqueueing.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [OURS, EVERYTHING], ids=["workers sinks and producers", "everything"])
def test_a_job_whose_processes_are_killed_over_and_over_stores_what_an_undisturbed_one_does(
    tmp_path: Path, expected: dict[bytes, Stored], kills: dict[str, int]
) -> None:
    write_prompts(tmp_path / "b1.jsonl", PROMPTS)
    with machine_in(tmp_path) as machine:
        up = machine.up("--engine", "--no-flower", *PACE)
        assert up.returncode == 0, up.stderr
        killer = Killer(machine, random.Random(SEED))
        victims = [name for name, count in kills.items() for _ in range(count)]
        killer.dice.shuffle(victims)
        try:
            for victim in victims:
                killer.kill(victim)
        finally:
            killer.stop()
        sys.stdout.write(f"seed {SEED}: {kills}, {killer.held} calls and results in their hands\n")
        last = machine.producer("enqueue", *JOB)
        assert last.returncode == 0, last.stderr
        wait_for_the_end(machine)
        verified = machine.storage("verify", "out")
        assert verified.returncode == 0, verified.stdout
        assert machine.producer("down").returncode == 0
        until(lambda: not machine.processes())

    found = read_store(tmp_path / "out")
    assert found.keys() == expected.keys()
    different = [i.hex() for i in expected if found[i] != expected[i]]
    assert not different
