"""What must hold once a job is finished, whatever was done to it. Each invariant has a name.

The store is read with zarr (`books.py`) and recomputed with the engine's model (`recompute.py`).
"""

import contextlib
import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from tests.faults.books import Books, digest_of, read_books
from tests.faults.cluster import Cluster, until
from tests.faults.job import Job
from tests.faults.recompute import is_right, tensor_digest

QUEUES = ("short", "long", "capture", "sink")
WORTH_PROCESSES = 200
PROCESSES = 3
VERIFIED_WITHIN_S = 900.0
SWEPT_WITHIN_S = 120.0
"""What a crash left in spool and staging goes so soon after the run is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was looked at."""

    samples: int
    dead: int
    lost: int
    """Wanted prompts without an outcome."""
    twice: int
    """Prompts with more than one visible response."""
    torn: int
    """Segments that `storage verify` finds damaged."""
    wrong: int
    """Samples that are not what the engine computes."""

    @property
    def ok(self) -> bool:
        return not (self.lost or self.twice or self.torn or self.wrong)


class Invariants:
    """Checks one cluster's store, again and again as it grows: what was recomputed is not once more."""

    def __init__(self, cluster: Cluster, job: Job, *, seed: int = 7) -> None:
        self._cluster, self._job, self._seed = cluster, job, seed
        self._good: set[tuple[bytes, bytes]] = set()
        self._checking = threading.Lock()

    def hold(self, dead: Sequence[bytes] = ()) -> Checked:
        """All of them; `dead` are the prompts that must be dead letters, and no other may be."""
        self.status_agrees_with_the_store()
        self.nothing_is_left_in_redis()
        self.nothing_is_left_in_spool_and_staging()
        torn = self.no_segment_is_torn()
        books = read_books(self._cluster.out)
        wanted = books.wanted(self._job.cap)
        lost, twice = self.every_prompt_has_one_outcome(books, wanted, dead)
        self.states_belong_to_the_digest_they_carry(books)
        wrong = self.samples_are_what_the_engine_computes(books, [w for w in wanted if w not in set(dead)])
        checked = Checked(samples=len(wanted), dead=len(dead), lost=lost, twice=twice, torn=torn, wrong=wrong)
        assert checked.ok, checked
        return checked

    def every_prompt_has_one_outcome(
        self, books: Books, wanted: Sequence[bytes], dead: Sequence[bytes]
    ) -> tuple[int, int]:
        """Wanted prompts without an outcome, and prompts with more than one visible response."""
        assert len(wanted) == self._job.cap * len(self._job.datasets)
        failed = {one for one in books.failures if one not in books.tensors}
        assert failed == set(dead), {one.hex(): books.failures[one] for one in failed ^ set(dead)}
        lost = 0
        for one in wanted:
            digests = {answer.digest for answer in books.answers.get(one, ())}
            has_states = any(tensor.digest in digests for tensor in books.tensors.get(one, ()))
            lost += not has_states and one not in failed
        return lost, sum(len(answers) > 1 for answers in books.answers.values())

    def states_belong_to_the_digest_they_carry(self, books: Books) -> None:
        for answer in chain.from_iterable(books.answers.values()):
            assert answer.digest == digest_of(answer.tokens)
            prompt = books.prompt_tokens[answer.id]
            assert np.array_equal(answer.tokens[: answer.prompt_length], prompt)
        for one, tensors in books.tensors.items():
            digests = {answer.digest for answer in books.answers.get(one, ())}
            for tensor in tensors:
                assert tensor.digest in digests, f"states of {one.hex()} belong to no visible response"
            # two nodes may store the same key, and a reader takes the first
            nodes = Counter(tensor.segment.name.rsplit("-", 1)[0] for tensor in tensors)
            assert max(nodes.values()) == 1, f"{one.hex()} has its states twice on one node"

    def samples_are_what_the_engine_computes(self, books: Books, wanted: Sequence[bytes]) -> int:
        """How many are not, tokens and states bit for bit."""
        with self._checking:
            new = [(one, books.answers[one][0]) for one in wanted]
            new = [(one, answer) for one, answer in new if (one, answer.digest) not in self._good]
            work = [
                (
                    answer.tokens,
                    answer.prompt_length,
                    one,
                    [tensor_digest(tensor.read()) for tensor in books.tensors[one]],
                    self._seed,
                )
                for one, answer in new
            ]
            with self._computing(len(work)) as compute:
                right = list(compute(is_right, *zip(*work, strict=True))) if work else []
            good = [(one, answer.digest) for (one, answer), ok in zip(new, right, strict=True) if ok]
            self._good.update(good)
            return len(new) - len(good)

    def begin(self) -> None:
        """Recompute what is stored by now: what is found right need not be when the job is over."""
        try:
            books = read_books(self._cluster.out)
        except (OSError, ValueError, KeyError):
            return  # the folder is away, or a segment is: another time
        whole = [one for one in books.answers if one in books.tensors]
        with contextlib.suppress(OSError):
            self.samples_are_what_the_engine_computes(books, whole)

    @contextmanager
    def _computing(self, count: int) -> Iterator[Callable[..., Iterable[bool]]]:
        """`map`, in processes of their own where it is worth their start."""
        if count < WORTH_PROCESSES:
            yield map
            return
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(PROCESSES, mp_context=spawning) as pool:
            yield partial(pool.map, chunksize=16)

    def no_segment_is_torn(self) -> int:
        verified = self._cluster.machine.storage("verify", str(self._cluster.out), within_s=VERIFIED_WITHIN_S)
        assert verified.returncode in (0, 1), verified.stderr
        assert verified.returncode == 0, verified.stdout
        return 0

    def nothing_is_left_in_redis(self) -> None:
        client = self._cluster.client

        def left() -> dict[str, int]:
            nodes = [f"sink.{node.name}" for node in self._cluster.nodes]
            waiting = {name: client.llen(name) for name in (*QUEUES, *nodes)}
            waiting |= {"unacked": client.hlen("unacked"), "index": client.zcard("unacked_index")}
            waiting["window"] = client.hlen("eyas:window")
            return {name: count for name, count in waiting.items() if count}

        try:
            until(lambda: not left(), "nothing is left in Redis", 90.0, 0.2)
        except AssertionError:
            raise AssertionError(f"left in Redis: {left()}") from None

    def nothing_is_left_in_spool_and_staging(self) -> None:
        cluster = self._cluster

        def left() -> list[str]:
            staging = cluster.out / ".staging"
            found = [f"{node.name}/{name}" for node in cluster.nodes for name in node.files()]
            return found + [path.name for path in entries(staging)]

        try:
            until(lambda: not left(), "nothing is left in spool and staging", SWEPT_WITHIN_S, 0.2)
        except AssertionError:
            raise AssertionError(f"left in spool and staging: {left()}") from None

    def status_agrees_with_the_store(self) -> None:
        # Right after a fault there may be no fresh snapshot, and `status` reads the store itself.
        until(lambda: self._job.status()["source"] == "redis", "`status` tells of Redis' snapshot", 60.0, 1.0)
        status, books = self._job.status(), read_books(self._cluster.out)
        for dataset in status["datasets"]:
            wanted = books.prompts[dataset["name"]][: self._job.cap]
            stored = sum(one in books.tensors for one in wanted)
            dead = sum(one in books.failures and one not in books.tensors for one in wanted)
            said = (dataset["wanted"], dataset["stored"], dataset["failed"])
            assert said == (len(wanted), stored, dead), dataset["name"]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []
