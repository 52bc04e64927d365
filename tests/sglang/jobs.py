"""Whole jobs on a real server, as a person types them; and the prompts they are made of."""

import json
import random
import string
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.system.machine import Machine

SHARED = "Answer in one short sentence, and do not explain how you came to it. "
"""How half of the prompts begin, so that servers find them in their prefix caches."""
WATCH_WITHIN_S = 240.0


def write_prompts(path: Path, count: int, *, longest_words: int = 120, seed: int = 0) -> Path:
    """JSONL of made-up questions from a few words to many, most of them short, each its own."""
    rng = random.Random(seed)
    lines = []
    for number in range(count):
        words = int(2 * (longest_words / 2) ** rng.random())
        text = " ".join(
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 6))) for _ in range(words)
        )
        lines.append(json.dumps({"prompt": f"{SHARED if number % 2 else ''}{number} {text}?"}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_tokenized(path: Path, count: int, *, longest: int = 400, seed: int = 0) -> Path:
    """JSONL of rows that are token ids already, their second half an answer that was given."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            ids = [rng.randrange(6, 500) for _ in range(rng.randint(2, longest))]
            mask = [int(t >= len(ids) // 2) for t in range(len(ids))]
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    return path


@dataclass(frozen=True, slots=True)
class Office:
    """A machine that is up without an engine, and what a person does on it."""

    machine: Machine

    @property
    def of_plugin(self) -> Mapping[str, str]:
        """What a server with the plugin must be told to share this machine's spool."""
        return {name: self.machine.environment[name] for name in ("EYAS_NODE", "EYAS_SPOOL_DIR")}

    def enqueue(self, output: str, *flags: str) -> "subprocess.CompletedProcess[str]":
        """`producer enqueue` into this folder of the machine's."""
        return self.machine.producer("enqueue", "--output-dir", output, *flags)

    def run(self, output: str, *flags: str) -> Path:
        """A job from enqueue to a verified store without a dead letter; the store."""
        enqueued = self.enqueue(output, *flags)
        assert enqueued.returncode == 0, enqueued.stderr
        log = self.machine.folder / f"{output}-watch.log"
        watching = self.machine.start("watch", log=log)
        try:
            ended = watching.wait(WATCH_WITHIN_S)
        finally:
            watching.kill()
            watching.wait()
        assert ended == 0, log.read_text()
        verified = self.machine.storage("verify", output)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        return self.machine.folder / output


def flags_of(**values: object) -> Sequence[str]:
    """`short_max_tokens=8` as `--short-max-tokens 8`."""
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
