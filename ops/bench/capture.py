"""What a capture costs a real SGLang: none, a stock server's JSON, and the plugin, on the same load.

    EYAS_SGLANG_PYTHON=… python -m ops.bench.capture [--quick] [--python …] [--hidden 1024] [--layers 2]

Three servers on the same model take turns, round by round, so that whatever else the machine does
falls on all of them; figures are medians over the rounds. Two loads: `capture` prefills sequences and
takes every row, as replay does; `inline` generates and takes the rows on the way. A fourth turn sends
the plugin's server requests that ask for nothing. Clients read replies and throw them away, and delete
the files as a sink would.

What a CPU cannot show: copies from a device and their overlap with computing, tensor-parallel ranks,
and how the time of a token's forward pass compares with 60 KB of rows on GPUs.
"""

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ops.bench.report import Row, print_rows, say
from ops.bench.sglang_server import Server, running

ROOT = Path(__file__).parents[2]
REPLY_WITHIN_S = 60.0
VOCABULARY = 2048
"""As in `wide_model.py`, which only SGLang's Python can import."""
AUX = (
    "--enable-return-hidden-states",
    "--enable-return-aux-hidden-states",
    "--speculative-algorithm",
    "EAGLE3",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent in one round."""

    name: str
    requests: int
    prompt_tokens: int
    new_tokens: int
    at_once: int

    @property
    def tokens(self) -> int:
        """Tokens computed, and rows that a capture gives."""
        return self.requests * (self.prompt_tokens + self.new_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One load on one server."""

    seconds: float
    scheduler_cpu_s: float
    server_cpu_s: float
    """Of all of its processes."""
    http_bytes: int
    """Bodies of the replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One way of asking one server."""

    name: str
    server: Server
    states: bool
    spool: Path | None
    """Where files are to be deleted; None when states come in the reply, or not at all."""


def main() -> int:
    """Measure and print the rows; 0, or 2 without an SGLang."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python", default=os.environ.get("EYAS_SGLANG_PYTHON"), help="SGLang's (EYAS_SGLANG_PYTHON)"
    )
    parser.add_argument("--hidden", type=int, default=1024, help="H (default 1024)")
    parser.add_argument("--layers", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default 7)")
    parser.add_argument("--spool-dir", type=Path, help="default: one in memory (/dev/shm), else temporary")
    parser.add_argument("--quick", action="store_true", help="small: shows only that it runs")
    arguments = parser.parse_args()
    if not arguments.python:
        say("error: no SGLang\n\nhint: set EYAS_SGLANG_PYTHON to the Python of its environment")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended on the way out
    rounds = 1 if arguments.quick else arguments.rounds
    scale = 1 if arguments.quick else 4
    loads = (
        Load(name="capture", requests=4 * scale, prompt_tokens=512, new_tokens=1, at_once=3 * scale),
        Load(name="inline", requests=4 * scale, prompt_tokens=128, new_tokens=64, at_once=16),
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        turns = _turns(stack, folder, arguments)
        for load in loads:
            print_rows(_rows(load, _measure(load, turns, rounds)))
    return 0


def _turns(stack: ExitStack, folder: Path, arguments: argparse.Namespace) -> tuple[Turn, ...]:
    """Start the servers."""
    model = folder / "model"
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    spool = arguments.spool_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
    script = Path(__file__).with_name("wide_model.py")
    made = [arguments.python, str(script), str(model), str(arguments.hidden), str(arguments.layers)]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # hs[1]; of a model with seven blocks and more EAGLE-3's own three, which differ there
    layers = ("--return-aux-hidden-state-layer-ids", "0") if arguments.layers < 7 else ()
    plugin = _plugin(folder / "site") | {"EYAS_SPOOL_DIR": str(spool), "EYAS_NODE": "bench"}

    def start(name: str, *flags: str, **environ: str) -> Server:
        say(f"starting `{name}` …")
        environ = {"SGLANG_PLUGINS": "none"} | environ
        log = folder / f"{name}.log"
        return stack.enter_context(running(arguments.python, model, *flags, log=log, environ=environ))

    none = start("none")
    stock = start("stock", *AUX, *layers)
    ours = start("plugin", *AUX, *layers, **plugin)
    return (
        Turn(name="none", server=none, states=False, spool=None),
        Turn(name="stock", server=stock, states=True, spool=None),
        Turn(name="plugin", server=ours, states=True, spool=spool),
        Turn(name="plugin, not asked", server=ours, states=False, spool=None),
    )


def _plugin(site: Path) -> dict[str, str]:
    """The plugin of this tree, found as an installed one is: by metadata on the path."""
    metadata = site / "eyas-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: eyas\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\neyas = workers.plugin.entry:load\n")
    return {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "SGLANG_PLUGINS": "eyas"}


def _measure(load: Load, turns: Sequence[Turn], rounds: int) -> dict[str, list[Round]]:
    """Rounds of each turn, one after the other; a first round that warms up is thrown away."""
    found: dict[str, list[Round]] = {turn.name: [] for turn in turns}
    for number in range(rounds + 1):
        for turn in turns:
            measured = _unstalled(load, turn, seed=number)
            say(
                f"{load.name} {turn.name:<18} {measured.seconds:6.2f} s  "
                f"{measured.scheduler_cpu_s / load.tokens * 1e6:6.0f} of "
                f"{measured.server_cpu_s / load.tokens * 1e6:6.0f} µs CPU a token  "
                f"{measured.http_bytes / load.tokens:8.0f} B HTTP a token"
            )
            if number:
                found[turn.name].append(measured)
    return found


def _unstalled(load: Load, turn: Turn, seed: int) -> Round:
    """A round; one in which a reply stays away is begun anew.

    SGLang 0.5.23 was seen to leave replies lying for minutes until another request came, without any
    plugin and without states: that is no measure of a capture.
    """
    while True:
        try:
            return _round(load, turn, seed)
        except TimeoutError:
            say(f"{load.name} {turn.name}: a reply stayed away for {REPLY_WITHIN_S:g} s, once more")


def _round(load: Load, turn: Turn, seed: int) -> Round:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(10, VOCABULARY, (load.requests, load.prompt_tokens)).tolist()
    before, begun = turn.server.cpu_s(), time.monotonic()
    with ThreadPoolExecutor(load.at_once) as pool:
        sizes = list(pool.map(lambda prompt: _ask(load, turn, prompt), prompts))
    seconds = time.monotonic() - begun
    after = turn.server.cpu_s()
    return Round(
        seconds=seconds,
        scheduler_cpu_s=after[0] - before[0],
        server_cpu_s=after[1] - before[1],
        http_bytes=sum(sizes),
    )


def _ask(load: Load, turn: Turn, prompt: list[int]) -> int:
    """Send one request; bytes of the reply's body."""
    sampling: dict[str, Any] = {"max_new_tokens": load.new_tokens, "temperature": 0, "ignore_eos": True}
    name = secrets.token_hex(12)
    if turn.spool is not None:
        sampling["custom_params"] = {"eyas": {"states": "spool", "name": name}}
    asked = {"input_ids": prompt, "sampling_params": sampling, "return_hidden_states": turn.states}
    request = urllib.request.Request(
        f"{turn.server.url}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REPLY_WITHIN_S) as reply:
        body = reply.read()
    if turn.spool is not None:
        (turn.spool / name).unlink()  # raises when the states are not there
    return len(body)


def _rows(load: Load, found: dict[str, list[Round]]) -> list[Row]:
    """Ratios to a server that captures nothing."""

    def median(name: str, value: str) -> float:
        return statistics.median(float(getattr(one, value)) for one in found[name])

    rows = []
    for name in ("stock", "plugin", "plugin, not asked"):
        limit = 1.10 if name == "plugin" else None
        rows.append(
            Row(
                what=f"{load.name}: server time, {name} ÷ no capture",
                measured=statistics.median(
                    one.seconds / none.seconds for one, none in zip(found[name], found["none"], strict=True)
                ),
                at_most=limit,
            )
        )
        for what, value in (("scheduler", "scheduler_cpu_s"), ("whole server", "server_cpu_s")):
            cpu = median(name, value) / median("none", value)
            rows.append(
                Row(what=f"{load.name}: CPU of the {what} a token, {name} ÷ no capture", measured=cpu)
            )
    for name in ("none", "stock", "plugin"):
        size = median(name, "http_bytes") / load.tokens
        rows.append(Row(what=f"{load.name}: bytes over HTTP a token, {name}", measured=size, unit="B"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
