"""What a cluster is asked to do: prompts in datasets, queued by `producer enqueue`, and the wait for them.

The cap is raised as the job goes on, so that there is always something in flight when a fault comes.
"""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.cluster import Cluster, until

SAMPLING = ("--short-max-tokens", "64", "--long-max-tokens", "96", "--seed", "7")
DEADLY = "Some numbers are poison. What about {n}?"
QUESTION = "What is {n} plus {more}? Explain step {n}."


class Job:
    """One run. `more` asks for further prompts; a killed `enqueue` is repeated with the same words."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        prompts: int,
        lanes: tuple[str, ...] = ("short",),
        concurrency: tuple[int, int, int] = (6, 2, 6),
        states: str = "replay",
        deadly: frozenset[int] = frozenset(),
    ) -> None:
        """`concurrency` per server: short, long, capture. `deadly`: rows of B1 that kill their server."""
        self.cluster = cluster
        self.datasets = {f"B{n + 1}": lane for n, lane in enumerate(lanes)}
        self.deadly = deadly
        self.cap = 0
        """Prompts of each dataset asked for."""
        self.enqueueing: subprocess.Popen[bytes] | None = None
        self._asked = 0
        self._lock = threading.RLock()
        short, long, capture = concurrency
        self._limits = ("--short-concurrency", str(short), "--long-concurrency", str(long))
        self._limits += ("--capture-concurrency", str(capture), "--states", states)
        self._write(prompts)

    def _write(self, count: int) -> None:
        folder, text = self.cluster.folder, []
        for name, lane in self.datasets.items():
            with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                for n in range(count):
                    file.write(json.dumps({"prompt": self._question(name, n)}) + "\n")
            text.append(f'[[dataset]]\nname = "{name}"\nsource = "file:{name}.jsonl"\nlane = "{lane}"\n')
        (folder / "datasets.toml").write_text("\n".join(text), encoding="utf-8")

    def _question(self, dataset: str, n: int) -> str:
        return DEADLY.format(n=n) if dataset == "B1" and n in self.deadly else question(dataset, n)

    @property
    def words(self) -> tuple[str, ...]:
        servers = (word for proxy in self.cluster.proxies for word in ("--server-url", proxy.url))
        out = ("--output-dir", str(self.cluster.out), "--max-samples", str(self.cap))
        return ("enqueue", "--manifest", "datasets.toml", *out, *servers, *SAMPLING, *self._limits)

    def more(self, count: int) -> None:
        """Ask for so many more of each dataset; returns when `enqueue` has."""
        with self._lock:
            self.cap += count
            done = self.cluster.machine.producer(*self.words)
            assert done.returncode == 0, done.stderr
            self._asked = self.cap

    def begin_more(self, count: int) -> None:
        """The same, beside the caller; `keep_asking` repeats it when it is killed."""
        with self._lock:
            self.cap += count
            self.enqueue()

    def enqueue(self) -> None:
        """Start `enqueue` unless it runs."""
        with self._lock:
            if self.enqueueing is None or self.enqueueing.poll() is not None:
                log = self.cluster.logs / "enqueue.log"
                self.enqueueing = self.cluster.machine.start(*self.words, log=log)
                self._asked = self.cap

    def keep_asking(self) -> bool:
        """Repeat an `enqueue` that ended badly or began before the cap was raised; whether it has all."""
        with self._lock:
            status = None if self.enqueueing is None else self.enqueueing.poll()
            if self.enqueueing is not None and status is None:
                return False
            if self._asked == self.cap and status in (None, 0):
                return True
            self.enqueue()
            return False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No `enqueue` runs, and none is begun."""
        with self._lock:
            if self.enqueueing is not None:
                self.enqueueing.wait(120)
            yield

    def kill_enqueue(self) -> bool:
        """SIGKILL `enqueue`; whether there was one."""
        with self._lock:
            if self.enqueueing is None or self.enqueueing.poll() is not None:
                return False
            self.enqueueing.kill()
            self.enqueueing.wait()
            return True

    def end(self) -> None:
        """Leave no `enqueue` behind."""
        with self._lock:
            self.kill_enqueue()

    def status(self) -> dict[str, Any]:
        """What `producer status --json` says."""
        said = self.cluster.machine.producer("status", "--json", "--output-dir", str(self.cluster.out))
        assert said.returncode == 0, said.stderr
        return json.loads(said.stdout)

    def left(self) -> int | None:
        """Prompts without a response, of the dataset that has fewest; None while nobody says."""
        seen = self.cluster.glance()
        if seen is None or seen.board is None or not seen.board.datasets:
            return None
        return min(self.cap - d.generated - d.failed for d in seen.board.datasets)

    def stored(self) -> int:
        """Segments of states, counted in the folder."""
        return len(segments(self.cluster.out / "states"))

    def finish(self, within_s: float = 120.0) -> None:
        """Until every prompt asked for has its outcome, as the board says, and the sinks hold nothing."""
        wanted = self.cap * len(self.datasets)
        deadline = time.monotonic() + within_s

        def over() -> bool:
            seen = self.cluster.glance()
            board = seen.board if seen else None
            if board is None or not (board.finished and board.done == board.wanted == wanted):
                return False
            return not board.unacked and not board.sink_waiting

        try:
            until(over, "the job is finished", max(0.0, deadline - time.monotonic()), 0.2)
        except AssertionError as error:
            seen = self.cluster.glance()
            raise AssertionError(f"{error}: {seen.board if seen else 'no Redis'}") from None


def question(dataset: str, n: int) -> str:
    """A short prompt of its own."""
    if dataset == "B1":
        return QUESTION.format(n=n, more=n * 7 % 13)
    return f"Tell me about number {n}, slowly: " + " ".join(str(n * k % 17) for k in range(12))


def segments(folder: Path) -> list[str]:
    """Committed segments in this folder and below, by name."""
    try:
        return sorted(str(path.relative_to(folder)) for path in folder.glob("**/s-*") if path.is_dir())
    except OSError:
        return []
