"""Tokenize, store and queue 7 000 prompts, against encoding the same rows one by one with transformers.

Both in this process, each round between two of the other: a real store with its fsyncs, a real
Redis, the bundled tiny model's tokenizer; imports and loading are outside both. Prints the seconds
of every round and, last, the median of the rounds' ratios (to reach: ≤ 2).
`python -m ops.bench.enqueue [--prompts FILE] [--quick]`.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ops.bench.report import Row, print_rows, say
from producer.datasets.manifest import Dataset, find_manifest
from producer.datasets.model_folder import find_model
from producer.datasets.preparing import Prepared, prepare
from producer.datasets.prompts import Limits
from producer.datasets.reading import read_into
from producer.datasets.sources import read_rows
from producer.datasets.template import Template
from producer.machine.redis_server import find_redis, free_port, redis_arguments
from producer.queueing import Queue
from storage.run import RunSpec, Sampling, StatesMode
from storage.settings import DatasetSettings, RunSettings, write_settings
from storage.store import Store
from workers.board.presence import answers
from workers.config import load_config
from workers.engine import tiny_model_dir

PROMPTS = 7000
NAMES = ("Ada", "Bo", "Chen", "Dina", "Emre", "Fay")
THINGS = ("apples", "marbles", "books", "stamps", "tickets", "tiles")


def word_problem(rng: random.Random) -> str:
    """A few sentences of about a hundred tokens, no two alike."""
    steps = [
        f"{rng.choice(NAMES)} has {rng.randint(2, 900)} {rng.choice(THINGS)} and gives "
        f"{rng.randint(1, 90)} percent of them to {rng.choice(NAMES)}."
        for _ in range(rng.randint(1, 4))
    ]
    return " ".join([*steps, f"How many {rng.choice(THINGS)} are left in the end?"])


@contextmanager
def redis() -> Iterator[str]:
    """The URL of a Redis of our own."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        arguments = redis_arguments(find_redis(), folder=Path(folder), port=port, password=None)
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"redis://127.0.0.1:{port}/0"
            while not answers(url):
                time.sleep(0.02)
            yield url
        finally:
            process.kill()
            process.wait()


def row_by_row(model: Path, prepared: Prepared, count: int) -> float:
    """Seconds that transformers takes for the rows, one call each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    column = prepared.shape.column
    rows = [row.value[column] for row in read_rows(prepared.files)][:count]
    began = time.perf_counter()
    for text in rows:
        talk = [{"role": "user", "content": text}]
        tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False)
    return time.perf_counter() - began


def enqueue(folder: Path, url: str, model: Path, prepared: Prepared, count: int) -> float:
    """Seconds from the first row to the last message of the first window."""
    template = Template(find_model(str(model)))
    spec = RunSpec(
        model=str(model),
        tokenizer_digest="",
        template_digest="",
        vocab_size=template.vocab_size,
        sampling=Sampling(),
        short_max_tokens=256,
        long_max_tokens=256,
        states=StatesMode.OFF,
        capture=None,
    )
    name = prepared.dataset.name
    settings = RunSettings(
        server_urls=("http://127.0.0.1:1",),
        capture_urls=(),
        concurrency={"short": 150, "long": 32, "capture": 64},
        max_input_tokens=32_762,
        states=StatesMode.OFF,
        capture=None,
        datasets={name: DatasetSettings(max_samples=count)},
    )
    store = Store.create(folder, spec)
    queue = Queue(load_config(), url)
    limits = Limits(vocab_size=template.vocab_size, max_input_tokens=32_762, max_prompts=count)
    store.begin_dataset(prepared.spec)
    write_settings(folder, settings)
    queue.claim(store, settings)
    began = time.perf_counter()
    with queue.feeding(store):
        read_into(store, prepared, template, limits, progress=lambda batch: queue.wake())
    queue.feed(store, settings)
    return time.perf_counter() - began


def measure(prompts: Path | None, count: int, rounds: int) -> dict[str, Any]:
    """Both, in turns."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name, redis() as url:
        folder = Path(name)
        if prompts is None:
            rng = random.Random(7)
            prompts = folder / "prompts.jsonl"
            prompts.write_text(
                "".join(json.dumps({"prompt": word_problem(rng)}) + "\n" for _ in range(count))
            )
        dataset: Dataset = find_manifest(prompts).datasets[0]
        prepared, model = prepare(dataset), tiny_model_dir()
        os.environ["EYAS_REDIS_URL"] = url
        # The first of each pays for imports and caches.
        row_by_row(model, prepared, 100)
        enqueue(folder / "warm", f"{url[:-1]}15", model, prepared, 100)
        for number in range(rounds):
            before = row_by_row(model, prepared, count)
            ours.append(enqueue(folder / f"run-{number}", f"{url[:-1]}{number}", model, prepared, count))
            theirs.append((before + row_by_row(model, prepared, count)) / 2)
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {
        "prompts": count,
        "enqueue_s": [round(one, 3) for one in ours],
        "row_by_row_s": [round(one, 3) for one in theirs],
        "enqueue_to_row_by_row": round(statistics.median(ratios), 2),
    }


def main() -> None:
    """Print the measures and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, help="JSONL with a text column; default: made up")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.prompts, 700 if arguments.quick else PROMPTS, 1 if arguments.quick else 5)
    for key, value in found.items():
        say(f"{key} {value}")
    print_rows(
        [
            Row(
                what=f"tokenize + store + enqueue {found['prompts']} prompts ÷ encoding row by row",
                measured=found["enqueue_to_row_by_row"],
                at_most=2,
            )
        ]
    )


if __name__ == "__main__":
    main()
