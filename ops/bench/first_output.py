"""How soon each command says its first word with its output in a file, against an empty Python.

    python -m ops.bench.first_output [--quick]

Each command runs in a fresh folder with nothing to find (no Redis, no server, no store), so that
its first word is a greeting or an error; both have to come at once. The slowest of the medians is
the figure.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ops.bench.report import Row, print_rows, say

COMMANDS = (
    "producer --help",
    "producer plan",
    "producer enqueue",
    "producer status",
    "producer watch",
    "producer up",
    "producer down",
    "producer demo",
    "storage info store",
    "storage verify store",
)


def first_output_s(command: list[str], folder: Path) -> float:
    """Seconds from the start of the process to the first byte in its output file."""
    environment = {
        **os.environ,
        "EYAS_STATE_DIR": str(folder / "state"),
        "EYAS_OUTPUT_DIR": str(folder / "out"),
    }
    environment |= {"EYAS_REDIS_URL": "redis://127.0.0.1:1/0"}
    output = folder / "output"
    with output.open("wb") as file:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=folder, env=environment
        )
        while output.stat().st_size == 0 and process.poll() is None:
            time.sleep(0.001)
        taken = time.perf_counter() - begun
    process.terminate()
    process.wait(30)
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each command once")
    rounds = 1 if parser.parse_args().quick else 5
    scripts = Path(sys.executable).parent
    slowest, empty = 0.0, []
    for command in COMMANDS:
        name, *rest = command.split()
        times = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                times.append(first_output_s([str(scripts / name), *rest], Path(folder)))
                empty.append(first_output_s([sys.executable, "-c", "print(1)"], Path(folder)))
        say(f"{command}: {statistics.median(times):.2f} s")
        slowest = max(slowest, statistics.median(times))
    print_rows(
        [
            Row(
                what="first output of the slowest command, output in a file",
                measured=slowest,
                at_most=1,
                unit="s",
            ),
            Row(what="the same ÷ a Python that prints one line", measured=slowest / statistics.median(empty)),
        ]
    )


if __name__ == "__main__":
    main()
