"""Requests to a server with the plugin, and what of them is compared with transformers."""

import json
import os
import secrets
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from storage.sample import SpoolRef
from storage.spool import Spool

NODE = "node-of-the-server"
HIDDEN = 128
LAYERS = 8


@dataclass(slots=True)
class Answer:
    """One reply."""

    prompt: list[int]
    content: dict[str, Any]

    @property
    def meta(self) -> dict[str, Any]:
        return self.content["meta_info"]

    @property
    def said(self) -> dict[str, Any]:
        return self.meta["eyas_states"]

    @property
    def ran(self) -> list[int]:
        """The tokens that have rows: all but the last."""
        return (self.prompt + self.content["output_ids"])[:-1]


class Asker:
    """One server and its spool."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.spool = Spool(folder, NODE, 1 << 40)

    def ask(self, prompt: list[int], new: int = 1, **given: Any) -> Answer:
        with httpx.Client(base_url=self.url, timeout=100) as client:
            reply = client.post("/generate", json=body(prompt, new, **given))
        assert reply.status_code == 200, reply.text
        return Answer(prompt, reply.json())

    def ask_all(self, prompts: list[list[int]], new: int = 1, at_once: int = 8) -> list[Answer]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, new), prompts))

    def rows(self, said: dict[str, Any]) -> np.ndarray:
        """The file's rows, uint16 [t, L, H]; it is deleted."""
        ref = SpoolRef(node=said["node"], name=said["name"], shape=tuple(said["shape"]), crc32=said["crc32"])
        rows = np.concatenate([block.copy() for block in self.spool.blocks(ref)])
        self.spool.delete(ref)
        return rows

    def files(self) -> list[str]:
        """What is in the spool, once nothing is given up any more: that is done beside the reply."""
        deadline = time.monotonic() + 20
        while True:
            found = sorted(path.name for path in self.spool.folder.iterdir())
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)


def body(
    prompt: list[int], new: int = 1, *, eyas: dict[str, Any] | None = None, **given: Any
) -> dict[str, Any]:
    """A greedy request that asks for states in the spool unless `eyas` says otherwise."""
    asked = {"states": "spool", "name": secrets.token_hex(12)} | (eyas or {})
    sampling = {"max_new_tokens": new, "temperature": 0, "custom_params": {"eyas": asked}}
    sampling |= given.pop("sampling", {})
    fresh = {"extra_key": secrets.token_hex(8)} if given.pop("fresh", True) else {}
    return {
        "input_ids": prompt,
        "rid": secrets.token_hex(16),
        "return_hidden_states": True,
        "sampling_params": sampling,
        **fresh,
        **given,
    }


def prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random ids of the tests' vocabulary."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    return [rng.integers(10, 300, int(length)).tolist() for length in lengths]


def as_floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def worst_cosine(
    answers: list[Answer], rows: list[np.ndarray], hs_indices: list[int], environment: Any, folder: Path
) -> float:
    """The smallest over all rows and layers against transformers on the same weights."""
    ids, made = folder / "ids.json", folder / "rows.npz"
    ids.write_text(json.dumps([answer.ran for answer in answers]))
    script = Path(__file__).with_name("transformers_rows.py")
    subprocess.run(
        [environment.python, script, environment.model, ids, made],
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    worst = 1.0
    with np.load(made) as reference:
        for number, (answer, bits) in enumerate(zip(answers, rows, strict=True)):
            wanted = reference[str(number)][:, hs_indices]
            found = as_floats(bits)
            assert found.shape == wanted.shape == (len(answer.ran), len(hs_indices), HIDDEN)
            lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(wanted, axis=-1)
            worst = min(worst, float(((found * wanted).sum(-1) / lengths).min()))
    return worst
