"""Progress: lines into a file, a bar onto a terminal; numbers as words."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from producer.talk import line
from producer.words import big, count, duration, size

ROOT = Path(__file__).parents[2]
WORK = """
from producer.talk import progress
with progress("tokenize", total=3, dataset="B1") as bar:
    bar.advance(tokens=1200)
    bar.update(3, tokens=2500)
"""


def test_into_a_file_progress_is_a_line_at_the_start_and_one_at_the_end() -> None:
    said = subprocess.run(
        [sys.executable, "-c", WORK],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, last = said.stderr.splitlines()
    assert first.startswith("tokenize dataset=B1 done=0 total=3 elapsed_s=")
    assert last.startswith("tokenize dataset=B1 tokens=2500 done=3 total=3 ")
    assert last.endswith("state=done")


def test_on_a_terminal_progress_is_a_bar() -> None:
    ours, theirs = pty.openpty()
    environment = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    working = subprocess.Popen([sys.executable, "-c", WORK], env=environment, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end is closed: Linux says EIO
            break
    os.close(ours)
    assert working.wait(timeout=30) == 0
    assert "━" in shown.decode()
    assert "3/3" in shown.decode()
    assert "2,500" in shown.decode()


def test_values_with_spaces_are_quoted() -> None:
    assert line("note", {"says": "no sink", "n": 3, "s": 0.5}) == 'note says="no sink" n=3 s=0.5'


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (3599, "1 h 00 min"),
        (61_500, "17 h 05 min"),
        (200_000, "2 d 8 h"),
    ],
)
def test_durations_read_in_their_two_largest_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("number", "words"), [(812, "812"), (999.7, "1.0 K"), (92_100_000, "92.1 M"), (123_456, "123 K")]
)
def test_big_numbers_have_three_digits_at_most(number: float, words: str) -> None:
    assert big(number) == words


def test_counts_and_sizes() -> None:
    assert count(7000) == "7 000"
    assert size(1.5e9) == "1.5 GB"
    assert size(320_000) == "320 kB"
    assert size(12) == "12 B"
