"""Installs this tree for a server as its users do, `pip install --no-deps`, in a folder of its own."""

import shutil
import subprocess
from pathlib import Path

from tests.sglang.environment.build import Environment

ROOT = Path(__file__).parents[3]


def install(environment: Environment, folder: Path) -> dict[str, str]:
    """What to add to the environment of a server that shall load the plugin.

    A copy is built, so that nothing is left in the tree.
    """
    source, site = folder / "source", folder / "site"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("producer", "workers", "storage"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [str(environment.python), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", str(site), str(source)], check=True, stdin=subprocess.DEVNULL)
    return {"PYTHONPATH": str(site), "SGLANG_PLUGINS": "eyas"}
