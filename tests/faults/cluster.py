"""A cluster of real processes on this machine: Redis, servers behind proxies, lanes, sinks, two nodes.

Each node has its own EYAS_NODE and spool, and all share one output folder. What is asked of it is
`job.py`'s; what goes wrong, the families of faults.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from producer.machine.redis_server import find_redis, free_port, redis_arguments
from tests.faults.disks import Disk
from tests.faults.processes import Supervised, Supervisor
from tests.faults.proxy import Proxy
from tests.system.machine import Machine, machine_in
from workers.board.presence import Glance, answers, glance
from workers.broker.celeryconfig import TIMING_VARIABLE

HURRIED = {
    "visibility_s": 6,
    "renew_s": 1,
    "sweep_s": 1,
    "slots_s": 5,
    "drain_s": 2,
    "exit_s": 3,
    "settle_s": 3,
}
"""So that a short test sees what takes 40 s otherwise."""
CAPACITY = {"short": 16, "long": 8, "capture": 16, "sink": 1}


def until(condition: Callable[[], Any], what: str, within_s: float = 60.0, every_s: float = 0.05) -> Any:
    """What the condition gives, once it gives something."""
    deadline = time.monotonic() + within_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
        time.sleep(every_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cluster consists of."""

    nodes: tuple[tuple[str, ...], ...] = (("short", "capture", "sink"),)
    """The workers of each node; `sink.2` is a second sink."""
    engines: int = 1
    """Servers; each writes into the spool of the node of its number."""
    pace_ms: tuple[int, int] = (400, 10)
    """Least time to a server's first token, and to each further one."""
    timing: dict[str, float] | None = None
    """Hurried times; None for the real ones."""
    spool_mb: int = 0
    """Size of each spool, a file system of its own; 0 leaves it on the disk."""
    store_mb: int = 0
    """The same for the output folder."""
    deadly: str = ""
    """Words in a prompt that kill the server that generates from it; empty for none."""
    clocks: bool = False
    """Whether the clocks of the first node's workers can be moved."""


class Node:
    """One node: its name, its spool and its workers."""

    def __init__(self, number: int, folder: Path, spool_mb: int) -> None:
        self.number = number
        self.name = f"node{number}"
        self.folder = folder / self.name
        self.folder.mkdir()
        self.disk = Disk(self.folder / "disk", spool_mb)
        self.spool = self.disk.path / "spool"
        self.clock = self.folder / "clock"
        """How far the clock of this node's workers is off, seconds."""

    def files(self) -> list[str]:
        return sorted(path.name for path in self.spool.glob("*")) if self.spool.exists() else []


class Cluster:
    """Everything that runs. Made by `cluster_in`, which ends it."""

    def __init__(self, machine: Machine, shape: Shape, seed: int) -> None:
        self.machine, self.shape, self.folder = machine, shape, machine.folder
        self.logs = self.folder / "logs"
        self.logs.mkdir()
        self.disk = Disk(self.folder / "disk", shape.store_mb)
        self.out = self.disk.path / "out"
        self.redis_port = free_port()
        self.redis_url = f"redis://127.0.0.1:{self.redis_port}/0"
        self.redis_folder = self.folder / "redis"
        self.redis_folder.mkdir()
        self.client = redis.Redis.from_url(self.redis_url, socket_timeout=5, socket_connect_timeout=2)
        self.nodes = [Node(n + 1, self.folder, shape.spool_mb) for n in range(len(shape.nodes))]
        self.supervisor = Supervisor()
        self.proxies: list[Proxy] = []
        self.engines: list[str] = []
        machine.environment |= {"EYAS_REDIS_URL": self.redis_url, "EYAS_NODE": "node1"}
        machine.environment |= {"EYAS_SPOOL_DIR": str(self.nodes[0].spool), "OPENBLAS_NUM_THREADS": "1"}
        if shape.timing:
            machine.environment[TIMING_VARIABLE] = json.dumps(shape.timing)
        self._start_redis()
        for number in range(shape.engines):
            self._add_engine(number, seed)
        for node, workers in zip(self.nodes, shape.nodes, strict=True):
            for worker in workers:
                self._add_worker(node, worker)

    def __getitem__(self, name: str) -> Supervised:
        return self.supervisor.processes[name]

    def workers(self, sort: str = "") -> list[str]:
        """Names of the workers, of a sort if one is given: `short@node1` …"""
        return [name for name in self.supervisor.processes if "@" in name and name.startswith(sort)]

    def glance(self) -> Glance | None:
        return glance(self.redis_url)

    def in_flight(self, name: str) -> int:
        """What the process has in its hands, as it says."""
        seen = self.glance()
        process = self[name]
        return 0 if seen is None else sum(p.in_flight for p in seen.processes if p.pid == process.pid)

    def wait_until_ready(self, *names: str, within_s: float = 90.0) -> None:
        """Until these (all workers when none is named) say that they are there, as they run now."""
        wanted = names or tuple(self.workers())

        def there() -> bool:
            seen = self.glance()
            said = {p.pid for p in seen.processes} if seen else set()
            return all(self[name].pid in said for name in wanted)

        until(there, f"{', '.join(wanted)} ready", within_s)

    def busy(self, name: str, within_s: float = 90.0) -> None:
        """Until the process has work in its hands."""
        until(lambda: self.in_flight(name), f"{name} has work in its hands", within_s)

    def _start_redis(self) -> None:
        arguments = redis_arguments(
            find_redis(), folder=self.redis_folder, port=self.redis_port, password=None
        )
        self._add("redis", arguments, {})
        until(lambda: answers(self.redis_url), "Redis answers")

    def _add_engine(self, number: int, seed: int) -> None:
        node = self.nodes[min(number, len(self.nodes) - 1)]
        upstream, port = free_port(), free_port()
        name = f"engine{number + 1}"
        first_ms, further_ms = self.shape.pace_ms
        command = [sys.executable, "-m", *self._engine(), "--port", str(upstream)]
        command += ["--spool-dir", str(node.spool), "--node", node.name]
        command += ["--pace-ttft-ms", str(first_ms), "--pace-tpot-ms", str(further_ms)]
        self._add(name, command, {"EYAS_NODE": node.name})
        self.engines.append(name)
        self.proxies.append(Proxy(port=port, upstream=upstream, spool_dir=node.spool, seed=seed + number))
        until(lambda: "engine listening" in self[name].text(), f"{name} listens", 60)

    def _engine(self) -> list[str]:
        """The module that is the server, and what it is told first."""
        if not self.shape.deadly:
            return ["workers.engine"]
        file = self.folder / "deadly.json"
        file.write_text(json.dumps([{"words": self.shape.deadly, "when": "generate"}]))
        return ["tests.system.deadly_engine", str(file)]

    def _add_worker(self, node: Node, worker: str) -> None:
        queue = worker.partition(".")[0]
        name = f"{worker}@{node.name}"
        command = [sys.executable, "-m", "celery", "-A", "workers", "worker", "-P", "threads"]
        command += ["-c", str(CAPACITY[queue]), "-Q", queue, "-n", name, "-E"]
        command += ["--loglevel", "INFO", "--without-gossip", "--without-mingle"]
        environment = {"EYAS_NODE": node.name, "EYAS_SPOOL_DIR": str(node.spool)}
        if self.shape.clocks and node.number == 1:
            environment |= movable_clock(node.clock, self.machine.environment["PYTHONPATH"])
        self._add(name, command, environment)

    def _add(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.supervisor.add(
            Supervised(
                name=name,
                command=command,
                environment={**self.machine.environment, "PYTHONUNBUFFERED": "1", **environment},
                folder=self.folder,
                log=self.logs / f"{name}.log",
            )
        )

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        self.supervisor.end()
        self.client.close()

    def unmount(self) -> None:
        for disk in (self.disk, *(node.disk for node in self.nodes)):
            disk.unmount()


def movable_clock(file: Path, import_path: str) -> dict[str, str]:
    """The environment under which a process's wall clock, and only that, is off by what `file` says."""
    file.write_text("0")
    folder = Path(__file__).parent / "clock"
    return {"EYAS_TEST_CLOCK": str(file), "PYTHONPATH": f"{folder}{os.pathsep}{import_path}"}


@contextmanager
def cluster_in(folder: Path, shape: Shape, seed: int = 1) -> Iterator[Cluster]:
    """A running cluster that leaves no process and no mount behind; its folder stays."""
    folder.mkdir(exist_ok=True)
    with machine_in(folder) as machine:
        cluster = None
        try:
            cluster = Cluster(machine, shape, seed)
            yield cluster
        finally:
            if cluster is not None:
                cluster.close()
                for process in machine.processes():
                    process.kill()
                cluster.unmount()


def copy_for_study(source: Path, to: Path) -> None:
    """What lies on a file system that goes away, kept."""
    if source.exists():
        shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True, ignore_dangling_symlinks=True)


def may_mount() -> bool:
    """Whether this process may mount a tmpfs."""
    return os.geteuid() == 0 and shutil.which("mount") is not None
