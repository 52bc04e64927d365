"""`producer demo`: from bundled prompts to a verified store; interrupted, it leaves nothing."""

import re
import signal
from pathlib import Path

import psutil
import pytest

import storage
from tests.producer.machine.supervised import until
from tests.system.machine import Machine, machine_in


def of_this_machine(machine: Machine) -> list[psutil.Process]:
    """Every living process under the machine's temporary folder: the demo has a state folder of its own."""
    found = []
    for process in psutil.process_iter():
        try:
            told = process.environ().get("TMPDIR")
            if told == machine.environment["TMPDIR"] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.slow
def test_demo_ends_with_a_verified_store_and_says_how_to_read_it(tmp_path: Path) -> None:
    with machine_in(tmp_path) as machine:
        # settings made for other runs are none of the demo's business
        (tmp_path / "eyas.toml").write_text('output_dir = "mine"\nmodel = "none/such"\n')
        machine.environment |= {"EYAS_REDIS_URL": "redis://127.0.0.1:1/0", "EYAS_OUTPUT_DIR": "mine"}
        demo = machine.producer("demo", "--max-samples", "12")
        assert demo.returncode == 0, demo.stderr
        assert "all ok" in demo.stdout
        said = re.search(r"the store is (\S+)", demo.stdout)
        assert said is not None
        samples = storage.open(Path(said[1]))
        assert len(samples) == 48
        assert samples.sample(0).states.shape[0] == len(samples.sample(0).tokens)
        assert of_this_machine(machine) == []
        assert [path.name for path in (tmp_path / "tmp").iterdir()] == [Path(said[1]).name]
        assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_demo_leaves_no_process_and_no_folder(tmp_path: Path, how: signal.Signals) -> None:
    with machine_in(tmp_path) as machine:
        log = tmp_path / "demo.log"
        demo = machine.start("demo", log=log)
        until(lambda: "run in" in log.read_text())
        demo.send_signal(how)
        status = demo.wait(timeout=60)
        assert status == (130 if how is signal.SIGINT else -signal.SIGKILL)
        until(lambda: not of_this_machine(machine), within_s=60)
        # what SIGKILL cannot take along is the store, which is data
        left = [path.name for path in (tmp_path / "tmp").iterdir() if "state" in path.name]
        assert left == []
        if how is signal.SIGINT:
            assert list((tmp_path / "tmp").iterdir()) == []


def test_a_demo_into_the_folder_of_a_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with machine_in(tmp_path) as machine:
        (tmp_path / "run.json").write_text("{}")
        demo = machine.producer("demo", "--output-dir", str(tmp_path))
        assert demo.returncode == 2
        assert f"`{tmp_path}` holds a run already" in demo.stderr
        assert "--output-dir" in demo.stderr
        assert of_this_machine(machine) == []
        assert (tmp_path / "run.json").read_text() == "{}"
