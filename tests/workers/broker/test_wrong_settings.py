"""A setting that cannot be used ends `celery` with one sentence, not with a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[3])


@pytest.mark.parametrize("program", [["-m", "celery"], [str(Path(sys.executable).parent / "celery")]])
@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("EYAS_SPOOL_MAX_GB", "-1", "error: EYAS_SPOOL_MAX_GB `-1` is not a size above 0\n"),
        (
            "EYAS_GRACE_S",
            "soon",
            "error: EYAS_GRACE_S `soon` is no number of seconds from 1 to 3600\n\n"
            "hint: unset EYAS_GRACE_S, for 10 s\n",
        ),
        (
            "EYAS_NODE",
            "../x",
            "error: node `../x` cannot be a folder's name\n\nhint: use letters, digits, `.`, `_` and `-`, "
            "at most 100, beginning with a letter or digit\n",
        ),
    ],
)
def test_celery_says_what_is_wrong(
    tmp_path: Path, program: list[str], variable: str, value: str, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, *program, "-A", "workers", "worker", "-Q", "short"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT, "EYAS_STATE_DIR": str(tmp_path), variable: value},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (2, said)
