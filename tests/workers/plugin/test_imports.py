"""The plugin runs where nothing of Eyas' own dependencies is installed."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
LOADED = """
import json, sys
from unittest.mock import MagicMock
sys.modules["torch"] = MagicMock()  # stands for SGLang's; nothing is called while importing
before = set(sys.modules)
import importlib, pathlib
for path in pathlib.Path("workers/plugin").glob("*.py"):
    importlib.import_module(f"workers.plugin.{path.stem}" if path.stem != "__init__" else "workers.plugin")
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_it_imports_numpy_and_the_spool_and_nothing_else():
    ended = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    loaded = json.loads(ended.stdout)
    outside = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert outside <= {"numpy", "storage", "workers"}
    assert "storage.store" not in loaded
