"""All benchmarks one after the other, and the table of their figures: `make bench`.

Each runs as a process of its own and prints its rows (`report.py`); a figure that is short is
marked and changes the exit status only when the benchmark itself failed, since a loaded machine
is no fault of the code.
"""

import argparse
import subprocess
import sys
import time

from ops.bench.report import SKIPPED, read_row, say

BENCHES = ("first_output", "enqueue", "client", "lanes", "sink_write", "decode", "resume", "capture")
"""Modules of this folder, the quick ones first."""


def main() -> int:
    """Run what was asked for and print the table; the number of benchmarks that failed."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: shows only that each one runs")
    parser.add_argument("benches", nargs="*", metavar="NAME", help=f"some of: {', '.join(BENCHES)}")
    arguments = parser.parse_args()
    unknown = set(arguments.benches) - set(BENCHES)
    if unknown:
        parser.error(f"no benchmark `{unknown.pop()}`; there are: {', '.join(BENCHES)}")
    rows, failed = [], 0
    for name in arguments.benches or BENCHES:
        say(f"bench {name} …")
        begun = time.monotonic()
        command = [sys.executable, "-m", f"ops.bench.{name}", *(["--quick"] if arguments.quick else [])]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        found = [row for row in map(read_row, ended.stdout.splitlines()) if row]
        rows += found
        if ended.returncode == SKIPPED:
            continue
        failed += ended.returncode != 0 or not found
        say(f"bench {name}: exit {ended.returncode}, {time.monotonic() - begun:.0f} s")
    print("\n".join(map(str, rows)), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
