"""The environment of a real SGLang on a CPU, built once and kept: `python -m tests.sglang.environment.build`.

Prints the Python to use and the folder of the model. Both lie in a cache outside the tree, under
names made from the files that decide them, so that a change of these makes new ones. The Python is
the one named by EYAS_SGLANG_PYTHON, if any: it must start `sglang.launch_server` on this machine.
Needs only the standard library; the first time takes minutes and 2.5 GB from the package registry.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SHIMS = HERE / "eyas_cpu_shims.py"
REQUIREMENTS = HERE / "requirements.txt"
MAKE_MODEL = HERE / "make_model.py"
DONE = "complete"
"""Written last into a folder of the cache; one without it is begun anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where to find what a real server needs."""

    python: Path
    """An interpreter that can import SGLang."""
    model: Path
    """A small random Llama with its tokenizer."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/eyas`, made."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find_or_build() -> Environment:
    """Both, from the cache or made now; two processes that ask at once make it once."""
    cache = cache_folder()
    with alone(cache / "sglang.lock"):
        named = os.environ.get("EYAS_SGLANG_PYTHON")
        python = Path(named) if named else _environment(cache)
        return Environment(python=python, model=_model(cache, python))


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold this lock file; another process that wants it waits."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _environment(cache: Path) -> Path:
    folder = cache / f"sglang-cpu-{_digest(REQUIREMENTS, SHIMS)}"
    python = folder / "bin" / "python"
    if (folder / DONE).exists():
        return python
    _say(f"building SGLang for this CPU in {folder}: some minutes, 2.5 GB")
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    _run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS))
    packages = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    shutil.copy(SHIMS, packages)
    (Path(packages) / f"{SHIMS.stem}.pth").write_text(f"import {SHIMS.stem}\n")
    (folder / DONE).touch()
    return python


def _model(cache: Path, python: Path) -> Path:
    folder = cache / f"sglang-model-{_digest(MAKE_MODEL)}"
    if not (folder / DONE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run(str(python), str(MAKE_MODEL), str(folder))
        (folder / DONE).touch()
    return folder


def _digest(*files: Path) -> str:
    """12 hex digits over the files and the version of Python."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    built = find_or_build()
    sys.stdout.write(f"python={built.python}\nmodel={built.model}\n")
