"""The launch scripts of ops/sglang give flags that this SGLang knows, with values that it takes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.sglang.environment.build import Environment

pytestmark = pytest.mark.sglang
RECIPES = Path(__file__).parents[2] / "ops" / "sglang"
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
said = {name: vars(parser.parse_args(given)) for name, given in json.load(sys.stdin).items()}
print(json.dumps(said, default=str))
"""


def arguments_of(script: Path, folder: Path) -> list[str]:
    """What the script would start SGLang with: a `python` that only says its arguments stands in for it."""
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    said = subprocess.run(
        [str(script), "--log-level", "warning"],
        env={"PATH": f"{folder}:{os.environ['PATH']}", "MODEL": "org/model", "EYAS_SPOOL_DIR": str(folder)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert said[:2] == ["-m", "sglang.launch_server"]
    return said[2:]


def test_every_recipe_is_understood_as_it_is_meant(environment: Environment, tmp_path: Path) -> None:
    given = {script.stem: arguments_of(script, tmp_path) for script in RECIPES.glob("*.sh")}
    assert len(given) == 5
    answer = subprocess.run(
        [str(environment.python), "-c", PARSE],
        env={"PATH": os.environ["PATH"], "SGLANG_USE_CPU_ENGINE": "1"},
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    read = json.loads(answer.stdout.splitlines()[-1])
    for name, flags in read.items():
        assert flags["model_path"] == "org/model"
        assert flags["kv_cache_dtype"] in ("bf16", "bfloat16")
        assert flags["log_level"] == "warning", "what is added by hand is passed on"
        assert flags["enable_return_hidden_states"] is ("capture" in name)
        assert flags["disable_radix_cache"] is ("capture" in name)
    assert read["capture-stock"]["chunked_prefill_size"] == -1
    assert read["kimi-k2.5-generate"]["hicache_size"] == 48
    assert read["kimi-k2.5-generate"]["mem_fraction_static"] == 0.88
    assert read["kimi-k2.5-capture"]["tp_size"] == 8
    assert read["kimi-k2.5-capture"]["enable_return_aux_hidden_states"] is True
