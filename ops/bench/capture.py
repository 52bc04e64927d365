"""What a capture costs a real SGLang: none, a stock server's JSON, and the plugin, on the same load.

    make bench-capture    or    EYAS_SGLANG_PYTHON=… python -m ops.bench.capture [--quick] [--hidden 1024] …

A server that captures nothing and one that does, on the same model, take turns round by round, so that
whatever else the machine does falls on both: first a stock one, then one with the plugin, never more than
two at once. Figures are medians over the rounds of what was measured against the same round without a
capture. Two loads: `capture` prefills sequences and takes every row, as replay does; `inline` generates
and takes the rows on the way. The plugin's server is asked in three ways: states through a shared folder,
over HTTP, and none at all.

What a CPU cannot show: copies from a device and their overlap with computing, tensor-parallel ranks,
and how the time of a token's forward pass compares with 60 KB of rows on GPUs.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ops.bench.capture_rounds import Load, Round, States, Turn, unstalled
from ops.bench.report import SKIPPED, Row, print_rows, say
from ops.bench.sglang_server import Server, running
from storage.spool import Spool

ROOT = Path(__file__).parents[2]
AUX = (
    "--enable-return-hidden-states",
    "--enable-return-aux-hidden-states",
    "--speculative-algorithm",
    "EAGLE3",
)
WAYS = {
    "stock": {"stock": States.REPLY},
    "plugin": {
        "plugin, folder": States.FOLDER,
        "plugin, HTTP": States.HTTP,
        "plugin, not asked": States.NOT,
    },
}
"""Server → turns and how they ask it."""
TO_REACH = 1.10


def main() -> int:
    """Measure and print the rows; `SKIPPED` without an SGLang."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python", default=os.environ.get("EYAS_SGLANG_PYTHON"), help="SGLang's (EYAS_SGLANG_PYTHON)"
    )
    parser.add_argument("--hidden", type=int, default=1024, help="H (default 1024)")
    parser.add_argument("--layers", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--rounds", type=int, help="turns of each (default 9, quick: 1)")
    parser.add_argument("--only", choices=WAYS, help="compare this one (default: one after the other)")
    parser.add_argument("--spool-dir", type=Path, help="default: one in memory (/dev/shm), else temporary")
    parser.add_argument("--quick", action="store_true", help="small: shows only that it runs")
    arguments = parser.parse_args()
    if not arguments.python:
        say("capture: skipped, it needs a real SGLang: `make bench-capture`, or set EYAS_SGLANG_PYTHON")
        return SKIPPED
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended on the way out
    rounds = arguments.rounds or (1 if arguments.quick else 9)
    scale = 1 if arguments.quick else 4
    loads = (
        Load(name="capture", requests=4 * scale, prompt_tokens=512, new_tokens=1, at_once=3 * scale),
        Load(name="inline", requests=16, prompt_tokens=128, new_tokens=32 * scale, at_once=16),
    )
    with ExitStack() as stack:
        bench = _Bench(stack, arguments)
        none = bench.turn("none", bench.start("none", stack), States.NOT)
        for name in (arguments.only,) if arguments.only else WAYS:
            with ExitStack() as its_own:
                server = bench.start(name, its_own)
                turns = [none, *(bench.turn(what, server, how) for what, how in WAYS[name].items())]
                for load in loads:
                    print_rows(_rows(load, _measure(load, turns, rounds)))
    return 0


class _Bench:
    """The model, the spools, and how each server is started."""

    def __init__(self, stack: ExitStack, arguments: argparse.Namespace) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._python = arguments.python
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        spools = arguments.spool_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        self._there, self._here = (Spool(spools / node, node, 1 << 36) for node in ("there", "here"))
        self._model = self._folder / "model"
        script = Path(__file__).with_name("wide_model.py")
        made = [self._python, str(script), str(self._model), str(arguments.hidden), str(arguments.layers)]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # hs[1]; of a model with seven blocks and more EAGLE-3's own three, which differ there
        layers = ("--return-aux-hidden-state-layer-ids", "0") if arguments.layers < 7 else ()
        spool = {"EYAS_SPOOL_DIR": str(self._there.folder), "EYAS_NODE": self._there.node}
        none = {"SGLANG_PLUGINS": "none"}
        self._ways: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
            "none": ((), none),
            "stock": ((*AUX, *layers), none),
            "plugin": ((*AUX, *layers), _plugin(self._folder / "site") | spool),
        }

    def start(self, name: str, stack: ExitStack) -> Server:
        """The server of this name, until the stack ends."""
        say(f"starting `{name}` …")
        flags, environ = self._ways[name]
        log = self._folder / f"{name}.log"
        return stack.enter_context(running(self._python, self._model, *flags, log=log, environ=environ))

    def turn(self, name: str, server: Server, states: States) -> Turn:
        """One way of asking it."""
        return Turn(name=name, server=server, states=states, there=self._there, here=self._here)


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
        # Each round begins with another turn: whatever comes in waves must not always meet the same.
        for turn in (*turns[number % len(turns) :], *turns[: number % len(turns)]):
            measured = unstalled(load, turn, seed=number)
            say(
                f"{load.name} {turn.name:<18} {measured.seconds:6.2f} s  "
                f"{measured.scheduler_cpu_s / load.tokens * 1e6:6.0f} of "
                f"{measured.server_cpu_s / load.tokens * 1e6:6.0f} µs CPU a token  "
                f"{measured.lane_cpu_s / load.tokens * 1e6:6.0f} µs in the lane  "
                f"{measured.http_bytes / load.tokens:8.0f} B HTTP"
            )
            if number:
                found[turn.name].append(measured)
    return found


def _rows(load: Load, found: dict[str, list[Round]]) -> list[Row]:
    """Ratios to a server that captures nothing, round by round."""

    def ratio(name: str, value: str) -> float:
        pairs = zip(found[name], found["none"], strict=True)
        return statistics.median(getattr(one, value) / getattr(none, value) for one, none in pairs)

    def a_token(name: str, value: str) -> float:
        return statistics.median(float(getattr(one, value)) for one in found[name]) / load.tokens

    ways = [name for name in found if name != "none"]
    rows = []
    for name in ways:
        limit = TO_REACH if name == "plugin, folder" else None
        what = f"{load.name}: time, {name} ÷ no capture"
        rows.append(Row(what=what, measured=ratio(name, "seconds"), at_most=limit))
    for name in ways:
        what = f"{load.name}: CPU of the scheduler, {name} ÷ no capture"
        rows.append(Row(what=what, measured=ratio(name, "scheduler_cpu_s")))
        what = f"{load.name}: CPU of the whole server, {name} ÷ no capture"
        rows.append(Row(what=what, measured=ratio(name, "server_cpu_s")))
    for name in ("none", *ways):
        what = f"{load.name}: CPU of the lane a token, {name}"
        rows.append(Row(what=what, measured=a_token(name, "lane_cpu_s") * 1e6, unit="µs"))
        what = f"{load.name}: bytes over HTTP a token, {name}"
        rows.append(Row(what=what, measured=a_token(name, "http_bytes"), unit="B"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
