"""Puts plugins of this tree into a server's environment, as installing them would: by PYTHONPATH.

A folder of metadata named like a distribution is all that SGLang's search for entry points reads. It
comes before what is installed, and hides a distribution of the same name there.
"""

import os
from pathlib import Path

ROOT = Path(__file__).parents[3]
SPOILING = Path(__file__).parent / "spoiling"


def with_plugins(folder: Path, *, spoiled: bool = False, sglang: str | None = None) -> dict[str, str]:
    """What to add to the server's environment; `sglang` is the version it believes to be."""
    _distribution(folder, "eyas", "0", "eyas = workers.plugin.entry:load")
    names, paths = ["eyas"], [folder, ROOT]
    if spoiled:
        _distribution(folder, "eyas-test-spoiler", "0", "spoiler = eyas_test_spoiler:load")
        names.append("spoiler")
        paths.append(SPOILING)
    if sglang is not None:
        _distribution(folder, "sglang", sglang, "")
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "SGLANG_PLUGINS": ",".join(names)}


def _distribution(folder: Path, name: str, version: str, entry: str) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entry}\n" if entry else "")
