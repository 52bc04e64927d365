"""The command itself: help, suggestions, errors at its edge, and a terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from producer.captures import ModelSizes, resolve_capture
from producer.cli import COMMANDS
from storage.cli_errors import run_command
from storage.errors import UnsuitableError, UsageError
from tests.producer.small import Cli, write_lines

ROOT = Path(__file__).parents[2]


def test_help_lists_every_command(cli: Cli) -> None:
    ended = cli("--help")
    assert ended.status == 0
    for name in COMMANDS:
        assert f"  {name} " in ended.out


@pytest.mark.parametrize("name", ["plan", "enqueue"])
def test_every_option_says_its_variable_and_its_default(cli: Cli, name: str) -> None:
    ended = cli(name, "--help")
    options = " ".join(ended.out.split("Options:")[1].split())
    assert options.count("[env var: EYAS_") >= 12
    assert "EYAS_MAX_SAMPLES; default: (no cap)" in options
    assert "EYAS_SHORT_MAX_TOKENS; default: 10240" in options


def test_an_unknown_command_is_answered_with_the_nearest(cli: Cli) -> None:
    ended = cli("enqeue")
    assert ended.status == 2
    assert "did you mean `enqueue`?" in ended.err


def test_the_version_is_said(cli: Cli) -> None:
    assert cli("--version").out.startswith("eyas ")


def test_a_defect_is_one_line_and_a_traceback_only_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def broken() -> None:
        raise ValueError("oh")

    monkeypatch.delenv("EYAS_DEBUG", raising=False)
    assert run_command(broken, "broken", []) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ValueError: oh\n\nhint: ")
    assert "Traceback" not in said
    monkeypatch.setenv("EYAS_DEBUG", "1")
    assert run_command(broken, "broken", []) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["inf", "1e400", "nan", "-1", "0", "big"])
def test_a_spool_limit_that_is_no_size_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("EYAS_SPOOL_MAX_GB", size)
    ended = cli("enqueue")
    assert ended.status == 2
    assert f"EYAS_SPOOL_MAX_GB `{size}` is not a size" in ended.err


def test_a_settings_file_that_is_a_folder_is_no_defect(cli: Cli) -> None:
    Path("eyas.toml").mkdir()
    ended = cli("status")
    assert ended.status == 3
    assert "error: `eyas.toml`: Is a directory" in ended.err
    assert "defect" not in ended.err


def test_an_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def stopped() -> None:
        raise KeyboardInterrupt

    assert run_command(stopped, "stopped", []) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_captures_are_hugging_face_indices() -> None:
    sizes = ModelSizes(num_layers=61, hidden_size=7168)
    assert resolve_capture("eagle3", sizes).hs_indices == (2, 30, 58, 61)
    assert resolve_capture("aux", sizes).hs_indices == (2, 30, 58)
    assert resolve_capture("aux", sizes).norm == "none"
    assert resolve_capture("final", sizes).hs_indices == (61,)
    named = resolve_capture("29,2,16", sizes)
    assert (named.name, named.hs_indices) == ("hs-2-16-29", (2, 16, 29))
    assert resolve_capture("hs-2-16-29", sizes) == named
    for text in ("62", "2,62"):
        with pytest.raises(UsageError, match=f"`--capture {text}`"):
            resolve_capture(text, sizes)
    with pytest.raises(UnsuitableError, match="no three of EAGLE-3's"):
        resolve_capture("eagle3", ModelSizes(num_layers=6, hidden_size=8))


def test_on_a_terminal_it_goes_on_as_watch_and_ctrl_c_detaches(
    tmp_path: Path, redis_url: str, server: str
) -> None:
    source = write_lines(tmp_path / "b1.jsonl", [{"prompt": f"row {n}"} for n in range(20)])
    ours, theirs = pty.openpty()
    arguments = ["enqueue", "--manifest", str(source), "--server-url", server, "--redis-url", redis_url]
    process = subprocess.Popen(
        [sys.executable, "-m", "producer.cli", *arguments, "--output-dir", str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "EYAS_STATE_DIR": str(tmp_path), "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        assert "tokenize" in _until(ours, "Ctrl-C detaches")
        _until(ours, "of 20 samples")
        os.killpg(process.pid, signal.SIGINT)  # what a terminal sends at Ctrl-C
        _until(ours, "detached")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _until(terminal: int, text: str) -> str:
    shown = ""
    deadline = time.monotonic() + 60
    while text not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown
