"""The main job end to end on one machine: up, enqueue, watch, verify, read; and the second time."""

import json
from pathlib import Path

import numpy as np

import storage
from tests.system.machine import machine_in
from tests.system.prompts import write_prompts

PROMPTS = 24


def test_prompts_become_a_verified_store_and_a_second_run_finds_nothing_to_do(tmp_path: Path) -> None:
    write_prompts(tmp_path / "b1.jsonl", PROMPTS + 6)
    job = ("--manifest", "b1.jsonl", "--output-dir", "out", "--short-max-tokens", "64")
    with machine_in(tmp_path) as machine:
        up = machine.up("--engine", "--no-flower")
        assert up.returncode == 0, up.stderr

        enqueued = machine.producer("enqueue", *job, "--max-samples", str(PROMPTS))
        assert enqueued.returncode == 0, enqueued.stderr
        watched = machine.producer("watch")
        assert watched.returncode == 0, watched.stderr
        assert f"state=finished done={PROMPTS} wanted={PROMPTS}" in watched.stdout
        verified = machine.storage("verify", "out")
        assert verified.returncode == 0, verified.stdout + verified.stderr

        status = json.loads(machine.producer("status", "--json").stdout)
        assert (status["done"], status["wanted"], status["finished"]) == (PROMPTS, PROMPTS, True)

        samples = storage.open(tmp_path / "out")
        assert len(samples) == PROMPTS
        first = samples.sample(0)
        assert first.states.shape[0] == len(first.tokens)
        assert first.states.dtype == np.uint16
        before = {entry for entry in (tmp_path / "out").rglob("*") if entry.is_file()}

        again = machine.producer("enqueue", *job, "--max-samples", str(PROMPTS))
        assert again.returncode == 0, again.stderr
        assert machine.producer("watch").returncode == 0
        after = {entry for entry in (tmp_path / "out").rglob("*") if entry.is_file()}
        assert after == before

        more = machine.producer("enqueue", *job, "--max-samples", str(PROMPTS + 6))
        assert more.returncode == 0, more.stderr
        assert machine.producer("watch").returncode == 0
        assert len(storage.open(tmp_path / "out")) == PROMPTS + 6

        assert machine.producer("down").returncode == 0
        assert machine.processes() == []
        # with everything down the store alone still tells
        alone = json.loads(machine.producer("status", "--json", "--output-dir", "out").stdout)
        assert (alone["source"], alone["done"], alone["finished"]) == ("store", PROMPTS + 6, True)
