"""Compaction while others write and read: run by hand beside the sinks, and killed in the middle of it."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np

import storage
from tests.faults.cluster import Cluster
from tests.faults.fault import Fault, Stage

READ_AT_LEAST = 40


def all_faults() -> Iterator[Fault]:
    yield Fault(kind="compaction during reads and writes", victim="", run=beside_readers)
    yield Fault(kind="SIGKILL compaction", victim="", run=killed)


def start(cluster: Cluster) -> "subprocess.Popen[bytes]":
    """`storage compact`, beside whatever goes on."""
    with (cluster.logs / "compact.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "storage.cli", "compact", str(cluster.out)],
            cwd=cluster.folder,
            env=cluster.machine.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def beside_readers(stage: Stage) -> None:
    """A reader that opened the store before goes on reading, each sample whole, until all is merged."""
    with stage.job.quiet():
        samples = storage.open(stage.cluster.out)
    compaction = start(stage.cluster)
    read = 0
    while len(samples) and (compaction.poll() is None or read < READ_AT_LEAST) and not stage.over.is_set():
        sample = samples.sample(stage.dice.randrange(len(samples)))
        assert sample.states is not None
        assert len(sample.states) == len(sample.tokens)
        assert np.all(sample.states.max(axis=-1) > 0)
        read += 1
    # 3: another compaction, a sink's own, is at work in one of the folders
    assert compaction.wait() in (0, 3), (stage.cluster.logs / "compact.log").read_text()


def killed(stage: Stage) -> None:
    """SIGKILL at any moment of it."""
    compaction = start(stage.cluster)
    stage.last(stage.dice.uniform(0.2, 2.5))
    compaction.kill()
    compaction.wait()
