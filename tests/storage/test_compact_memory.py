"""What a compaction holds in memory does not grow with what it merges."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import io, resource, sys
sys.path.insert(0, "tests/storage")
from pathlib import Path
import numpy as np
from store_making import *
from storage.codec import Codec
from storage.compact import compact
from storage.progress import Progress

path, rows = Path(sys.argv[1]), int(sys.argv[2])
capture = CaptureSpec(name="eagle3", hs_indices=(2, 5, 8), norm="post", hidden_size=1024)
store = new_store(path / "out", with_spec(SPEC, capture=capture), Codec.NONE)
spool = Spool(path / "spool", "node1", 1 << 40)
prompts = make_prompts(8)
add_all(store, prompts)
tensor = np.random.default_rng(0).integers(1, 0x7F80, (rows, 3, 1024), dtype=np.uint16)
for prompt in prompts:
    states = make_states(make_response(prompt), spool, tensor)
    store.commit_states([states], spool)
    spool.delete(states.spool)
del tensor
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = compact(path / "out", Progress("compacting", io.StringIO()))
assert report.folders[1].merged == 8
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 8 * rows * 3 * 2)
"""


def test_the_memory_of_a_compaction_is_bounded(tmp_path: Path):
    """200 MB of states merged; all that made them was smaller than a quarter of that."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "4096"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown_kib, merged_kib = map(int, done.stdout.split())
    assert merged_kib == 196_608
    assert grown_kib < 65_536
