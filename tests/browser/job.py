"""A real job slow enough to be watched: four datasets, two engines, lanes, a sink and Flower."""

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.engine_process import running_engine
from tests.system.machine import Machine, machine_in
from tests.workers.flower.flower_process import Flower, running_flower

WORDS = (
    "river",
    "stone",
    "lamp",
    "seven",
    "garden",
    "quiet",
    "signal",
    "paper",
    "north",
    "copper",
    "harbour",
)
SECRET = "zanzibar"
"""A word that is in every prompt, and must be on no page."""
MANIFEST = """
[[dataset]]
name = "B1"
source = "file:b1.jsonl"
lane = "short"

[[dataset]]
name = "B2"
source = "file:b2.jsonl"
lane = "short"

[[dataset]]
name = "B5"
source = "file:b5.jsonl"
lane = "long"

[[dataset]]
name = "A1"
source = "file:a1.jsonl"
lane = "capture"
"""
SAMPLES = {"B1": 220, "B2": 160, "B5": 60, "A1": 60}


@dataclass
class Job:
    """A job that runs, and Flower beside it."""

    machine: Machine
    redis_url: str
    folder: Path
    flower: Flower

    def status(self) -> dict[str, Any]:
        """As `producer status --json` says it."""
        said = self.machine.producer("status", "--json")
        assert said.returncode == 0, said.stderr
        return json.loads(said.stdout)

    def until(self, condition: Callable[[dict[str, Any]], bool], within_s: float = 240.0) -> dict[str, Any]:
        """Wait for a state of the run."""
        deadline = time.monotonic() + within_s
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, json.dumps(status, indent=1)[:3000]
            time.sleep(0.5)
        return status


@contextmanager
def running_job(folder: Path) -> Iterator[Job]:
    """The job from its first call on; ended with all its processes."""
    write_datasets(folder)
    with ExitStack() as stack:
        machine = stack.enter_context(machine_in(folder))
        up = machine.up("--no-flower")
        assert up.returncode == 0, up.stderr
        state = machine.state
        engine = (
            *("--spool-dir", state["spool_dir"], "--context-length", 1024, "--slots", 32),
            *("--pace-ttft-ms", 500, "--pace-tpot-ms", 140),
        )
        urls = [stack.enter_context(running_engine(*engine)).url for _ in range(2)]
        servers = [word for url in urls for word in ("--server-url", url)]
        limits = ("--short-concurrency", "24", "--long-concurrency", "6", "--capture-concurrency", "12")
        flower = stack.enter_context(running_flower(folder, state["redis_url"]))
        enqueued = machine.producer(
            *("enqueue", "--manifest", "datasets.toml", "--output-dir", "eyas-data", *servers, *limits),
            *("--short-max-tokens", "80", "--long-max-tokens", "160", "--max-samples", "1000"),
        )
        assert enqueued.returncode == 0, enqueued.stderr
        yield Job(machine, state["redis_url"], folder, flower)


def write_datasets(folder: Path) -> None:
    """Prompts of some hundred tokens each, all others, and rows that are tokenized already."""
    chance = random.Random(5)
    for name, lengths in {"B1": (20, 60), "B2": (60, 120), "B5": (120, 200)}.items():
        rows = [
            {"prompt": f"{SECRET} {at} " + " ".join(chance.choices(WORDS, k=chance.randint(*lengths)))}
            for at in range(SAMPLES[name])
        ]
        (folder / f"{name.lower()}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"input_ids": ids} for ids in written_by_the_model(SAMPLES["A1"], chance)]
    (folder / "a1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "datasets.toml").write_text(MANIFEST)


def written_by_the_model(count: int, chance: random.Random) -> list[list[int]]:
    """Token ids of the model's own: others would be unlikely ones, which its checks notice."""

    def write(length: int) -> list[int]:
        body = {
            "input_ids": [chance.randrange(5, 200) for _ in range(4)],
            "sampling_params": {"max_new_tokens": length, "ignore_eos": True, "temperature": 0.7},
        }
        answer = httpx.post(f"{engine.url}/generate", json=body, timeout=100)
        ids: list[int] = answer.raise_for_status().json()["output_ids"]
        return ids

    with running_engine() as engine, ThreadPoolExecutor(16) as threads:
        return list(threads.map(write, [chance.randint(80, 200) for _ in range(count)]))
