"""Jobs on a server that spoils its states: what is wrong is on the board, in the log and on the segment."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

import storage
from storage.sample import SpoolRef
from storage.spool import Spool
from tests.system.machine import Machine, machine_in
from tests.system.prompts import write_prompts
from workers.engine import tiny_model_dir
from workers.sglang.audit.output_head import find_head

Spoil = Callable[[NDArray[np.uint16], bool], NDArray[np.uint16]]
"""States [T, L, H] and whether they are a second capture → the states the server shall have given."""
SAMPLES = 8
EVERY = 2


@contextmanager
def spoiling(upstream: str, spool: Spool, spoil: Spoil) -> Iterator[str]:
    """A proxy before a server with the plugin that changes files in the spool before it replies."""

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = httpx.request(
                self.command,
                f"{upstream}{self.path}",
                content=body,
                headers={"Content-Type": "application/json"},
                timeout=60,
            )
            content = answer.content
            if self.path == "/generate" and answer.status_code == 200 and b"eyas_states" in content:
                content = changed(json.loads(content), second=b"return_logprob" in body)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = forward  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Not on the tests' stderr."""

    def changed(reply: dict[str, Any], *, second: bool) -> bytes:
        said = reply["meta_info"]["eyas_states"]
        ref = SpoolRef(node=said["node"], name=said["name"], shape=tuple(said["shape"]), crc32=said["crc32"])
        states = np.concatenate([block.copy() for block in spool.blocks(ref)])
        spool.delete(ref)
        said["crc32"] = spool.write(ref.name, spoil(states, second)).crc32
        return json.dumps(reply).encode()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def as_they_are(states: NDArray[np.uint16], second: bool) -> NDArray[np.uint16]:
    return states


def one_row(states: NDArray[np.uint16], second: bool) -> NDArray[np.uint16]:
    """In one of the two captures a row is the first token's, as another request's would be."""
    if not second and len(states) > 3:  # the probe has two
        states[-3] = states[0]
    return states


def one_late(states: NDArray[np.uint16], second: bool) -> NDArray[np.uint16]:
    """Always: nothing differs between two captures."""
    return np.ascontiguousarray(np.roll(states, 1, axis=0))


def before_the_norm(states: NDArray[np.uint16], second: bool) -> NDArray[np.uint16]:
    """Always: the final state as a residual stream of three times the size has it."""
    norm = find_head(str(tiny_model_dir())).norm
    values = (states[:, -1].astype(np.uint32) << 16).view(np.float32) / norm * np.float32(3)
    states[:, -1] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return states


def job(machine: Machine, url: str, *flags: str) -> dict[str, Any]:
    """Run it to its end; what `status --json` says then."""
    write_prompts(machine.folder / "b.jsonl", SAMPLES)
    enqueued = machine.producer(
        *("enqueue", "--manifest", "b.jsonl", "--output-dir", "out", "--server-url", url),
        *("--short-max-tokens", "24", "--check-every", str(EVERY), *flags),
    )
    assert enqueued.returncode == 0, enqueued.stderr
    watched = machine.producer("watch")
    assert watched.returncode == 0, watched.stderr
    found: dict[str, Any] = json.loads(machine.producer("status", "--json").stdout)
    assert (found["done"], found["wanted"]) == (SAMPLES, SAMPLES)
    verified = machine.storage("verify", "out")
    assert verified.returncode == 0, verified.stdout
    assert len(storage.open(machine.folder / "out")) == SAMPLES, "an alarm costs no sample"
    alarms = [line for line in watched.stdout.splitlines() if line.startswith("alarm ")]
    assert bool(alarms) == bool(found["checks"]["alarmed"])
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with machine_in(tmp_path) as it:
        it.environment |= {"EYAS_SPOOL_DIR": str(tmp_path / "spool"), "EYAS_NODE": "here"}
        up = it.up("--engine", "--no-flower")
        assert up.returncode == 0, up.stderr
        yield it
        it.producer("down")


def spoiled_job(machine: Machine, spoil: Spoil, *flags: str) -> dict[str, Any]:
    spool = Spool(machine.folder / "spool", "here", 1 << 40)
    with spoiling(machine.state["engine_url"], spool, spoil) as url:
        return job(machine, url, *flags)


@pytest.mark.parametrize("mode", ["replay", "inline"])
def test_a_sound_server_is_checked_and_raises_no_alarm(machine: Machine, mode: str) -> None:
    checks = spoiled_job(machine, as_they_are, "--states", mode)["checks"]
    assert 1 <= checks["compared"] <= SAMPLES
    assert (checks["samples"], checks["with_head"]) == (checks["compared"], checks["compared"])
    # the engine gives the same bits whatever else it computes, and rounds its logits
    assert checks["worst_error"] == 0
    assert checks["head_error"] < 0.05
    assert (checks["alarmed"], checks["alarms"], checks["skipped"]) == (0, [], [])
    shown = machine.producer("status").stdout
    assert f"checks: {checks['compared']} samples captured again" in shown
    assert "no alarm" in shown
    assert list((machine.folder / "spool").iterdir()) == []
    machine.producer("down")
    alone = json.loads(machine.producer("status", "--json", "--output-dir", "out").stdout)
    assert (alone["source"], alone["checks"]) == ("store", checks)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [(one_row, "states.row"), (one_late, "head.differs"), (before_the_norm, "states.norm")],
)
def test_a_server_that_spoils_its_states_is_named_with_what_is_wrong(
    machine: Machine, spoil: Spoil, code: str
) -> None:
    found = spoiled_job(machine, spoil)
    checks = found["checks"]
    assert checks["alarmed"] == checks["compared"] >= 1
    assert code in {alarm["code"] for alarm in checks["alarms"]}
    alarm = next(one for one in checks["alarms"] if one["code"] == code)
    assert abs(alarm["value"]) > alarm["limit"]
    assert alarm["server"] in {server["url"] for server in found["servers"]}
    assert alarm["id"] in {sample_id.hex() for sample_id in storage.open(machine.folder / "out").ids}
    shown = machine.producer("status").stdout
    assert f"{checks['alarmed']} with an ALARM" in shown
    assert f"! {code}: " in shown
    attributes = [
        json.loads(path.read_text())["attributes"]
        for path in (machine.folder / "out" / "states" / "eagle3").glob("s-*/zarr.json")
    ]
    marked = {one["id"] for each in attributes for one in each["checks"] if one["alarms"]}
    assert alarm["id"] in marked
    logs = "".join(path.read_text() for path in machine.state_dir.rglob("*.log"))
    assert f"check.alarm code={code}" in logs
