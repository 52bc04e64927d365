"""Record a real SGLang's replies as fixtures: `record.py URL FLAVOUR [--key KEY] [--folder DIR]`.

A flavour is a way of starting the server (see `FLAVOURS`) and the calls worth keeping from it.
Every reply becomes `<folder>/<flavour>-<case>.json` with its request, status and body. Keys and
paths are replaced by neutral ones. It starts no server: the launch line is the flavour's comment.
"""

import argparse
import concurrent.futures
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

KEY = "KEY-THAT-MUST-NOT-LEAK"
MODEL = "/models/tiny-llama"
DROPPED = ("device_name", "internal_states", "launch_command", "random_seed")
"""Bulky or local parts of `/server_info` that nobody reads."""


class Recorder:
    """Calls one server and keeps what it said."""

    def __init__(self, url: str, key: str | None, folder: Path, flavour: str) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=120)
        self.key, self.folder, self.flavour = key, folder, flavour
        self.model = self.client.get("/model_info").json()["model_path"]

    def keep(self, case: str, request: Any, response: httpx.Response) -> None:
        """Write one exchange, neutralized."""
        try:
            body: Any = response.json()
        except ValueError:
            body = response.text
        if isinstance(body, dict):
            for name in DROPPED:
                body.pop(name, None)
        if isinstance(request, dict) and len(request["input_ids"]) > 100:
            request = request | {"input_ids": f"{len(request['input_ids'])} ids"}
        text = json.dumps({"request": request, "status": response.status_code, "body": body})
        text = re.sub(r"/[^ \"']*/site-packages", "/site-packages", text.replace(self.model, MODEL))
        if self.key:
            text = text.replace(self.key, KEY)
        (self.folder / f"{self.flavour}-{case}.json").write_text(text + "\n", encoding="utf-8")
        sys.stdout.write(f"{self.flavour} {case} {response.status_code} {len(text)}\n")

    def get(self, case: str, path: str, **options: Any) -> None:
        """Keep a GET."""
        self.keep(case, path, self.client.get(path, **options))

    def generate(self, case: str, body: Any) -> None:
        """Keep a `/generate`."""
        if isinstance(body, str):
            response = self.client.post(
                "/generate", content=body, headers={"Content-Type": "application/json"}
            )
        else:
            response = self.client.post("/generate", json=body)
        self.keep(case, body, response)


def body(ids: list[int], new: int, *, states: bool = True, **more: Any) -> dict[str, Any]:
    """A greedy request that never stops early."""
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True} | more.pop("sampling", {})
    return {"input_ids": ids, "sampling_params": sampling, "return_hidden_states": states, **more}


def ids(count: int, first: int = 10) -> list[int]:
    """Token ids that no other case begins with."""
    return [first + (7 * i) % 1500 for i in range(count)]


def facts(r: Recorder) -> None:
    """What a server says of itself."""
    r.get("server_info", "/server_info")
    r.get("model_info", "/model_info")
    r.get("models", "/v1/models")


def final(r: Recorder) -> None:
    """--enable-return-hidden-states --chunked-prefill-size -1 --api-key …"""
    facts(r)
    r.get("ready", "/ready")
    r.get("unauthorized", "/server_info", headers={"Authorization": "Bearer wrong"})
    r.generate("response", body(ids(40, 11), 12, states=False, rid="0123456789abcdef"))
    r.generate(
        "stopped", body(ids(40, 12), 400, states=False, sampling={"ignore_eos": False, "temperature": 1})
    )
    r.generate("inline", body(ids(6, 100), 4, extra_key="a"))
    r.generate("capture", body(ids(10, 200), 1, extra_key="b"))
    r.generate("cached-first", body(ids(20, 300), 1))
    r.generate("cached-again", body(ids(20, 300), 1))
    custom = {"custom_params": {"eyas": {"states": "spool", "name": "x"}}, "sampling_seed": 5}
    r.generate("custom", body(ids(4, 400), 1, sampling=custom))
    r.generate("refused-context", body(ids(3000), 1))
    r.generate("refused-input", body(ids(2045), 1))
    r.generate("refused-total", body(ids(2000), 100))
    r.generate("refused-empty", body([], 1))
    r.generate("refused-not-ints", body(["a", 1.5], 1))  # type: ignore[list-item]
    r.generate("refused-json", "{nonsense")
    r.generate("refused-sampling", body(ids(4), 1, sampling={"temperature": -1}))
    r.generate("refused-unknown", body(ids(4), 1, sampling={"nonsense": 1}))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        long = body(ids(30, 500), 1500, states=False, rid="f" * 16)
        running = pool.submit(lambda: r.client.post("/generate", json=long))
        until(lambda: busy(r))
        r.generate("refused-duplicate", body(ids(4), 1, rid="f" * 16))
        r.client.post("/abort_request", json={"rid": "f" * 16})
        r.keep("aborted", long, running.result())


def queue(r: Recorder) -> None:
    """--max-running-requests 1 --max-queued-requests 1"""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        calls = [body(ids(20, 600 + i), 600, states=False) for i in range(6)]
        done = list(pool.map(lambda c: (c, r.client.post("/generate", json=c)), calls))
    r.keep("full", *next((c, d) for c, d in done if d.status_code != 200))


def off(r: Recorder) -> None:
    """No states flags."""
    facts(r)
    r.generate("refused-states", body(ids(6), 1))


def aux(r: Recorder) -> None:
    """--enable-return-hidden-states --enable-return-aux-hidden-states --speculative-algorithm EAGLE3 …"""
    facts(r)
    r.generate("capture", body(ids(10, 200), 1, extra_key="b"))


def chunked(r: Recorder) -> None:
    """--enable-return-hidden-states --chunked-prefill-size 32"""
    facts(r)
    r.generate("capture", body(ids(40, 200), 1, extra_key="b"))


def retracted(r: Recorder) -> None:
    """SGLANG_TEST_RETRACT=1 SGLANG_TEST_RETRACT_INTERVAL=20; --enable-return-hidden-states --chunked-… -1"""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        calls = [body(ids(16, 700 + i), 60, extra_key=str(i)) for i in range(5)]
        done = list(pool.map(lambda c: (c, r.client.post("/generate", json=c)), calls))
    kept = [(c, d) for c, d in done if d.json()["meta_info"]["num_retractions"]]
    for number, (call, response) in enumerate(kept[:2]):
        r.keep(f"inline-{number}", call, response)


FLAVOURS: dict[str, Callable[[Recorder], None]] = {
    f.__name__: f for f in (final, queue, off, aux, chunked, retracted)
}


def busy(r: Recorder) -> bool:
    """Whether the server runs anything."""
    return any(load["num_running_reqs"] for load in r.client.get("/v1/loads").json()["loads"])


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, at most 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the server did not get there")
        time.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("flavour", choices=FLAVOURS)
    parser.add_argument("--key")
    parser.add_argument("--folder", type=Path, default=Path("tests/workers/sglang/recorded"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    FLAVOURS[options.flavour](Recorder(options.url, options.key, options.folder, options.flavour))
