"""A disk without room: the commit says so, leaves nothing, loses nothing, and works again later."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_making import dataset_spec, make_prompts, make_response, new_store

from storage.store import Store

PROGRAM = """
import resource, sys
sys.path.insert(0, "tests/storage")
from pathlib import Path
import numpy as np
from store_making import *
from storage.errors import FullError

path, limit = Path(sys.argv[1]), int(sys.argv[2])
store, spool = Store.open(path / "out"), Spool(path / "spool", "node1", 1 << 40)
responses = [make_response(prompt) for prompt in make_prompts(40)]
tensors = [np.random.default_rng(at).integers(1, 0x7F80, (4000, 3, 16), dtype=np.uint16) for at in range(8)]
batch = [make_states(response, spool, tensor) for response, tensor in zip(responses, tensors)]
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
for what, commit in {
    "responses": lambda: store.commit_responses(responses),
    "states": lambda: len(store.commit_states(batch, spool).stored),
    "prompts": lambda: store.add_prompts("B1", make_prompts(4000), next_row=0, complete=True, dropped={}),
}.items():
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
    try:
        commit()
        print(what, "committed")
    except FullError as error:
        print(what, error.code, len(list((path / "out/.staging").iterdir())))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    print(what, commit())
"""


def test_a_limit_on_file_sizes_stops_a_commit_cleanly_and_it_goes_on_afterwards(tmp_path: Path):
    new_store(tmp_path / "out").begin_dataset(dataset_spec())
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "2000"]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines() == [
        "responses output.full 0",
        "responses 40",
        "states output.full 0",
        "states 8",
        "prompts output.full 0",
        "prompts None",
    ]
    store = Store.open(tmp_path / "out")
    assert store.reading_state("B1").count == 4000
    assert store.response(make_prompts(1)[0].id).digest == make_response(make_prompts(1)[0]).digest


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_a_file_system_that_is_full_stops_a_commit_cleanly_wherever_it_happens(tmp_path: Path):
    """At every size from a few pages to enough, so that each write of a commit fails once."""
    program = """
import sys
sys.path.insert(0, "tests/storage")
from pathlib import Path
from store_making import *
from storage.errors import FullError
store, spool = new_store(Path(sys.argv[1])), Spool(Path(sys.argv[2]), "node1", 1 << 40)
responses = [make_response(prompt) for prompt in make_prompts(12)]
batch = [make_states(response, spool) for response in responses]
done = 0
try:
    done = store.commit_responses(responses)
    done += len(store.commit_states(batch, spool).stored)
except FullError as error:
    assert error.code == "output.full"
    assert list((store.path / ".staging").iterdir()) == []
visible = sum(1 for response in responses if Store.open(store.path)._shared.response(response.id))
assert visible in (0, 12) and done <= visible + 12
print(done)
"""
    outcomes = set()
    for pages in (24, 40, 56, 72, 88, 104, 200):
        disk = tmp_path / f"disk{pages}"
        disk.mkdir()
        size = f"size={pages * 4096}"
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], check=False)
        if mounted.returncode:
            pytest.skip("this container may not mount")
        try:
            command = [sys.executable, "-c", program, str(disk / "out"), str(tmp_path / "spool")]
            out = subprocess.run(command, capture_output=True, text=True, check=False)
            if "FullError" not in out.stderr:  # so small that the folder itself could not be made
                assert out.returncode == 0, out.stderr
                outcomes.add(int(out.stdout))
        finally:
            subprocess.run(["umount", disk], check=True)
    assert {0, 12, 24} <= outcomes
