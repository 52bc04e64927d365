"""`make soak`: a job that goes on while faults of every kind come by a seeded schedule; then every invariant.

`python -m tests.faults.soak --minutes 30 --seed N`. Ends with 0 when all invariants hold; otherwise its
folder, logs and store included, is left for study. The same seed draws the same faults in the same
order; how far the processes have come when one strikes is not repeatable.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.books import read_books
from tests.faults.cluster import Cluster, Shape, cluster_in, copy_for_study
from tests.faults.fault import Fault, Stage
from tests.faults.gauges import BOUNDS, Gauges
from tests.faults.invariants import Invariants
from tests.faults.job import Job
from tests.faults.plot import draw
from tests.faults.resuming import Commits, Lanes
from tests.faults.schedule import Drawn, all_faults, schedule

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "ops" / "bench" / "results"
NODES = (("short", "long", "capture", "sink", "sink.2"), ("short", "capture", "sink"))
SPARED = frozenset({"short@node2", "capture@node2", "sink@node2", "engine2"})
"""Never killed, so that their memory and files can be watched for the whole time."""
PROMPTS = 40_000
DEADLY = frozenset(range(300, PROMPTS, 700))
"""Rows of B1 that kill the server that generates from them."""
AHEAD = 240
"""Prompts of each dataset asked for beyond those that are done."""
RESUMES_WITHIN_S = 180.0
"""Longer than this is no recovery; the promise is 60."""
FINISHES_WITHIN_S = 600.0
GRACE_S = 30.0


@dataclass(slots=True)
class Counts:
    """What happened."""

    kinds: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    longest_after: str = ""
    longest_back_s: float = 0.0
    longest_back_after: str = ""
    resumes_s: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


class Soak:
    """One run of it."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.seed = cluster, seed
        self.job = Job(
            cluster, prompts=PROMPTS, lanes=("short", "long"), concurrency=(3, 3, 6), deadly=DEADLY
        )
        self.invariants = Invariants(cluster, self.job)
        self.counts = Counts()
        self.over = threading.Event()
        self._began = time.monotonic()

    def run(self, minutes: float) -> Counts:
        self.cluster.wait_until_ready()
        self.job.more(AHEAD)
        commits = Commits(self.cluster.out / "states" / "eagle3")
        asking = threading.Thread(target=self._keep_asking, name="asking", daemon=True)
        checking = threading.Thread(target=self._keep_checking, name="checking", daemon=True)
        asking.start()
        checking.start()
        try:
            assert commits.wait_after(time.monotonic(), 120) is not None, (
                "nothing was stored before any fault"
            )
            self._trouble(commits, self._began + 60 * minutes)
        finally:
            self.over.set()
            asking.join()
            checking.join()
            commits.stop()
        self._say("no more faults; waiting for the run to finish")
        while not self.job.keep_asking():
            time.sleep(0.5)
        self.job.finish(FINISHES_WITHIN_S)
        self._say("finished; checking")
        return self.counts

    def dead_letters(self) -> list[bytes]:
        """The prompts that killed their servers: these and no others must be dead letters."""
        ids = read_books(self.cluster.out).prompts["B1"][: self.job.cap]
        return [one for row, one in enumerate(ids) if row in DEADLY]

    def _trouble(self, commits: Commits, deadline: float) -> None:
        for drawn in schedule(all_faults(self.cluster, SPARED), self.seed):
            if time.monotonic() + drawn.after_s > deadline:
                return
            time.sleep(drawn.after_s)
            self._strike(drawn)
            ended, lanes = time.monotonic(), Lanes(self.cluster)
            name = " + ".join(map(str, drawn.faults))
            resumed = commits.wait_after(ended, RESUMES_WITHIN_S)
            self._say(
                f"{name}: over, next commit after {resumed if resumed is None else round(resumed, 1)} s"
            )
            if resumed is None:
                self.counts.broken.append(f"no commit within {RESUMES_WITHIN_S:.0f} s of {name}")
                raise AssertionError(self.counts.broken[-1])
            self.counts.resumes_s.append(resumed)
            if resumed > self.counts.longest_s:
                self.counts.longest_s, self.counts.longest_after = resumed, name
            self._wait_until_back(drawn, lanes, ended, name)

    def _strike(self, drawn: Drawn) -> None:
        threads = []
        for number, fault in enumerate(drawn.faults):
            self.counts.kinds[fault.kind] += 1
            self._say(f"{fault} …")
            threads.append(threading.Thread(target=self._one, args=(fault, drawn.seed + number)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if self.counts.broken:
            raise AssertionError("; ".join(self.counts.broken))

    def _one(self, fault: Fault, seed: int) -> None:
        stage = self._stage(seed)
        try:
            fault.run(stage)
        except Exception as error:
            self.counts.broken.append(f"{fault}: {error!r}")

    def _wait_until_back(self, drawn: Drawn, lanes: Lanes, ended: float, name: str) -> None:
        stage = self._stage(0)
        while lanes.rest() or not all(fault.is_back(stage) for fault in drawn.faults):
            if time.monotonic() - ended > RESUMES_WITHIN_S:
                rest = ", ".join(sorted(lanes.rest())) or "the victim"
                raise AssertionError(f"not at work again {RESUMES_WITHIN_S:.0f} s after {name}: {rest}")
            time.sleep(0.2)
        back = time.monotonic() - ended
        if back > self.counts.longest_back_s:
            self.counts.longest_back_s, self.counts.longest_back_after = back, name

    def _stage(self, seed: int) -> Stage:
        return Stage(cluster=self.cluster, job=self.job, dice=random.Random(seed), over=self.over)

    def _keep_asking(self) -> None:
        """Raise the cap whenever little is left, so that something is always in flight."""
        while not self.over.wait(1.0):
            left = self.job.left()
            if left is not None and left < AHEAD and self.job.keep_asking():
                self.job.begin_more(AHEAD)
            self.job.keep_asking()

    def _keep_checking(self) -> None:
        """Recompute samples as they come: at the end it would take as long as generating them."""
        while not self.over.wait(30.0):
            self.invariants.begin()

    def _say(self, text: str) -> None:
        say(f"{time.monotonic() - self._began:7.1f} s  {text}")


def say(text: str) -> None:
    """A line of the soak's report, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn when none is given, and printed")
    parser.add_argument("--folder", type=Path, default=None, help="for the run; a temporary one by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where CSV and plot go")
    asked = parser.parse_args()
    # so that it ends what it has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    folder = asked.folder or Path(tempfile.mkdtemp(prefix=f"eyas-soak-{seed}-"))
    say(f"soak: seed {seed}, {asked.minutes:g} minutes, in {folder}")
    shape = Shape(
        nodes=NODES,
        engines=2,
        pace_ms=(600, 10),
        deadly="poison",
        spool_mb=256,
        store_mb=3000,
        clocks=True,
    )
    try:
        return _soak(folder, shape, seed, asked.minutes, asked.results)
    except BaseException as error:
        say(f"FAILED: {error}\nseed {seed}; logs and store in {folder}")
        raise


def _soak(folder: Path, shape: Shape, seed: int, minutes: float, results: Path) -> int:
    with cluster_in(folder, shape, seed) as cluster:
        gauges = Gauges(cluster)
        soak = Soak(cluster, seed)
        try:
            counts = soak.run(minutes)
            checked = soak.invariants.hold(soak.dead_letters())
            gauges.stop()
            stubborn = cluster.supervisor.terminate(GRACE_S)
            assert not stubborn, f"did not heed SIGTERM within {GRACE_S:.0f} s: {stubborn}"
        except BaseException:
            soak.job.end()
            gauges.write(folder / "soak.csv")
            draw(gauges.readings, f"{minutes:g} minutes, seed {seed}, failed", folder / "soak.svg")
            _report(soak.counts, seed, minutes)
            copy_for_study(cluster.out, folder / "store")
            raise
    results.mkdir(parents=True, exist_ok=True)
    many = f"{counts.kinds.total()} faults, {checked.samples} samples"
    title = f"{minutes:g} minutes, seed {seed}: {many}"
    gauges.write(results / "soak.csv")
    draw(gauges.readings, title, results / "soak.svg")
    _report(counts, seed, minutes)
    say(
        f"samples {checked.samples}, lost {checked.lost}, twice {checked.twice}, "
        f"torn {checked.torn}, wrong {checked.wrong}, dead letters {checked.dead}, all of deadly prompts"
    )
    slopes = gauges.slopes()
    if not slopes:
        say("no process lived long enough to tell whether its memory is flat")
    for slope in slopes:
        verdict = "flat" if slope.is_flat else "GROWS"
        say(
            f"{slope.process:16} {slope.what:9} {slope.an_hour:+8.1f} an hour over "
            f"{slope.over_s / 60:.0f} min, bound {BOUNDS[slope.what]:g}: {verdict}"
        )
    summary = {
        "seed": seed,
        "minutes": minutes,
        "faults": dict(sorted(counts.kinds.items())),
        "samples": checked.samples,
        "dead_letters_of_deadly_prompts": checked.dead,
        "lost": checked.lost,
        "twice": checked.twice,
        "torn": checked.torn,
        "wrong": checked.wrong,
        "longest_to_next_commit_s": round(counts.longest_s, 1),
        "longest_to_next_commit_after": counts.longest_after,
        "longest_until_every_lane_works_s": round(counts.longest_back_s, 1),
        "longest_until_every_lane_works_after": counts.longest_back_after,
        "slopes_an_hour": {f"{s.process} {s.what}": round(s.an_hour, 1) for s in slopes},
    }
    (results / "soak.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(slope.is_flat for slope in slopes) else 1


def _report(counts: Counts, seed: int, minutes: float) -> None:
    say(f"\nseed {seed}, {minutes:g} minutes, {counts.kinds.total()} faults:")
    for kind, count in sorted(counts.kinds.items()):
        say(f"  {count:4}  {kind}")
    say(
        "longest from the end of a fault to the next committed sample: "
        f"{counts.longest_s:.1f} s ({counts.longest_after})"
    )
    say(
        "longest until the victim and every lane had done something: "
        f"{counts.longest_back_s:.1f} s ({counts.longest_back_after})"
    )


if __name__ == "__main__":
    sys.exit(main())
