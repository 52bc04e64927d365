"""A whole job whose server shares no folder with its lanes: over HTTP, or by a sink beside the server."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

import storage
from tests.engine_process import running_engine
from tests.system.machine import Machine, machine_in
from tests.system.prompts import write_prompts
from workers.board.processes import anyone_listening
from workers.broker.connection import connect

PROMPTS = 12


@contextmanager
def sink_of(machine: Machine, node: str, spool: Path) -> Iterator[None]:
    """A sink of that node, listening."""
    command = [sys.executable, "-m", "celery", "-A", "workers", "worker", "-P", "threads", "-c", "1"]
    command += ["-Q", "sink", "-n", f"sink@{node}", "--without-gossip", "--without-mingle"]
    log = machine.folder / "far-sink.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=machine.folder,
            env=machine.environment
            | {
                "EYAS_NODE": node,
                "EYAS_SPOOL_DIR": str(spool),
                "EYAS_OUTPUT_DIR": str(machine.folder / "out"),
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + 60
        with connect(machine.state["redis_url"]) as redis:
            while node not in anyone_listening(redis).sink_nodes:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def states_in_json(url: str, tokens: np.ndarray) -> np.ndarray:
    """The final state as a stock reply of the same server has it, uint16 [T, H]."""
    asked = {
        "input_ids": tokens.tolist(),
        "sampling_params": {"max_new_tokens": 1},
        "return_hidden_states": True,
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(asked).encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        (block,) = json.loads(reply.read())["meta_info"]["hidden_states"]
    return (np.array(block, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(
    "sink_there",
    [
        pytest.param(False, id="over HTTP"),
        pytest.param(True, id="by the sink there", marks=pytest.mark.slow),
    ],
)
def test_states_of_a_far_server_are_stored_bit_for_bit_and_no_spool_keeps_a_file(
    tmp_path: Path, sink_there: bool
) -> None:
    write_prompts(tmp_path / "b1.jsonl", PROMPTS)
    far, near = tmp_path / "far", tmp_path / "near"
    with machine_in(tmp_path) as machine, running_engine("--spool-dir", far, "--node", "gpu-1") as engine:
        machine.environment |= {"EYAS_NODE": "head", "EYAS_SPOOL_DIR": str(near)}
        up = machine.up("--no-flower", "--output-dir", "out")
        assert up.returncode == 0, up.stderr
        machine.environment["EYAS_REDIS_URL"] = machine.state["redis_url"]
        with sink_of(machine, "gpu-1", far) if sink_there else nullcontext():
            job = ("--manifest", "b1.jsonl", "--output-dir", "out", "--server-url", engine.url)
            enqueued = machine.producer("enqueue", *job, "--short-max-tokens", "32", "--capture", "final")
            assert enqueued.returncode == 0, enqueued.stderr
            watched = machine.producer("watch")
            assert watched.returncode == 0, watched.stdout + watched.stderr
        verified = machine.storage("verify", "out")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        samples = list(storage.open(tmp_path / "out"))
        assert len(samples) == PROMPTS
        for sample in samples[::3]:
            assert (sample.states[:, 0] == states_in_json(engine.url, sample.tokens)).all()
        segments = {path.name.rsplit("-", 1)[0] for path in (tmp_path / "out/states/final").glob("s-*")}
        assert segments == {"s-gpu-1" if sink_there else "s-head"}
        assert [list(spool.iterdir()) for spool in (far, near)] == [[], []]
        assert machine.producer("down").returncode == 0
