"""Worker, sink and producer killed over and over while a job runs: the store is as if nothing had been.

The moments are drawn from a seed, a property of the test's report; `EYAS_KILL_SEED` draws others.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import storage
from tests.producer.up.supervised import until
from tests.system.machine import Machine, machine_in
from tests.system.prompts import write_prompts
from workers.presence import glance

KILLS = 36
PROMPTS = 400
SEED = int(os.environ.get("EYAS_KILL_SEED", "20"))
JOB = ("--manifest", "b1.jsonl", "--output-dir", "out", "--short-max-tokens", "64", "--seed", "7")
FINISHES_WITHIN_S = 420
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


def undisturbed(folder: Path) -> dict[bytes, Stored]:
    folder.mkdir()
    write_prompts(folder / "b1.jsonl", PROMPTS)
    with machine_in(folder) as machine:
        up = machine.up("--engine", "--no-flower")
        assert up.returncode == 0, up.stderr
        enqueued = machine.producer("enqueue", *JOB)
        assert enqueued.returncode == 0, enqueued.stderr
        wait_for_the_end(machine)
        assert machine.producer("down").returncode == 0
    return read_store(folder / "out")


def wait_for_the_end(machine: Machine) -> None:
    watching = machine.start("watch", log=machine.folder / "watch.log")
    try:
        assert watching.wait(timeout=FINISHES_WITHIN_S) == 0, (machine.folder / "watch.log").read_text()
    finally:
        watching.kill()
        watching.wait()


class Killer:
    """Kills at random moments, each victim alive and with work in its hands."""

    def __init__(self, machine: Machine, dice: random.Random) -> None:
        self.machine = machine
        self.dice = dice
        self.killed: Counter[str] = Counter()
        self.in_flight = 0
        """Calls and results that were in the victims' hands, over all kills."""
        self.enqueueing: subprocess.Popen[bytes] | None = None

    def strike(self) -> bool:
        """One kill; False when the victim drawn has nothing in its hands now."""
        victim = self.dice.choice(("short", "capture", "sink", "enqueue"))
        self.keep_enqueueing()
        if victim == "enqueue":
            time.sleep(self.dice.uniform(0.0, 2.0))
            assert self.enqueueing is not None
            if self.enqueueing.poll() is not None:
                return False
            self.enqueueing.kill()
            self.enqueueing.wait()
        else:
            held = self.held_by(victim)
            if not held:
                return False
            os.kill(self.machine.state["processes"][victim]["pid"], signal.SIGKILL)
            self.in_flight += held
        self.killed[victim] += 1
        return True

    def held_by(self, lane: str) -> int:
        seen = glance(self.machine.state["redis_url"])
        pid = self.machine.state["processes"][lane]["pid"]
        return sum(p.in_flight for p in seen.processes if p.pid == pid) if seen else 0

    def keep_enqueueing(self) -> None:
        if self.enqueueing is None or self.enqueueing.poll() is not None:
            self.enqueueing = self.machine.start("enqueue", *JOB, log=self.machine.folder / "enqueue.log")

    def finished(self) -> bool:
        seen = glance(self.machine.state["redis_url"])
        return bool(seen and seen.carried and seen.carried.finished)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_whose_processes_are_killed_over_and_over_stores_what_an_undisturbed_one_does(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    expected = undisturbed(tmp_path / "undisturbed")
    assert len(expected) == PROMPTS

    folder = tmp_path / "killed"
    folder.mkdir()
    write_prompts(folder / "b1.jsonl", PROMPTS)
    with machine_in(folder) as machine:
        up = machine.up("--engine", "--no-flower", *PACE)
        assert up.returncode == 0, up.stderr
        killer = Killer(machine, random.Random(SEED))
        try:
            while sum(killer.killed.values()) < KILLS:
                assert not killer.finished(), f"the job was over after {killer.killed}"
                if killer.strike():
                    time.sleep(killer.dice.uniform(0.2, 3.0))
        finally:
            if killer.enqueueing is not None:
                killer.enqueueing.kill()
                killer.enqueueing.wait()
        record_property("seed", SEED)
        record_property("killed", dict(killer.killed))
        record_property("in_flight_at_kills", killer.in_flight)
        last = machine.producer("enqueue", *JOB)
        assert last.returncode == 0, last.stderr
        wait_for_the_end(machine)
        verified = machine.storage("verify", "out")
        assert verified.returncode == 0, verified.stdout
        assert machine.producer("down").returncode == 0
        until(lambda: not machine.processes())

    found = read_store(folder / "out")
    assert found.keys() == expected.keys()
    different = [i.hex() for i in expected if found[i] != expected[i]]
    assert not different
