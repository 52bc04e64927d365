"""The store against a perfect model in memory, whatever happens to its writers.

Two writers on two nodes commit, are killed between any two system calls, and open again; what they
commit twice, or in the middle of each other's work, counts once. Compactions and a sink's merges
run between, are killed, delete what is a day old. After every step all who read, those too that
opened long ago, see exactly what the model holds, and `verify` finds nothing; what is damaged on
purpose it finds.
"""

import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import storage
from storage import compaction_plan, upkeep
from storage.compact import compact
from storage.index import Index, Outcome
from storage.progress import Progress
from storage.reader import Samples
from storage.replaced import KEPT_S
from storage.sample import Failure, Response, SpoolRef
from storage.segment import list_segments
from storage.spool import Spool, SpoolReader
from storage.store import Store
from storage.upkeep import Upkeep
from storage.verify import verify
from tests.properties.killed import KillAt, killed
from tests.storage.store_making import (
    CAPTURE,
    add_all,
    assert_same,
    make_failure,
    make_prompts,
    make_response,
    make_states,
    new_store,
    outcome_of,
    tensor_of,
)

PROMPTS = make_prompts(12)
PICKS = st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=6, unique=True)
SEEDS = st.integers(1, 2)
"""Of a prompt's two possible responses, which."""
WHO = st.integers(0, 1)
DEATHS = st.one_of(
    st.builds(KillAt, step=st.integers(1, 250)),
    st.builds(KillAt, commit=st.integers(1, 4), after=st.booleans()),
)
Key = tuple[bytes, bytes | None]


class Interrupted(Progress):
    """A progress during whose first chunk something else happens."""

    def __init__(self, other: Callable[[], None]) -> None:
        self.other: Callable[[], None] | None = None
        super().__init__("compacting", io.StringIO())
        self.other = other

    def say(self, **values: object) -> None:
        other, self.other = self.other, None
        if other is not None:
            other()


class InterruptedSpool(Spool):
    """A spool during whose last reading something else happens: the segment is nearly written."""

    def __init__(self, spool: Spool, reads: int, other: Callable[[], None]) -> None:
        super().__init__(spool.folder, spool.node, spool.max_bytes)
        self.left, self.other = reads, other

    def reader(self, ref: SpoolRef) -> SpoolReader:
        self.left -= 1
        if self.left == 0:
            self.other()
        return super().reader(ref)


def quiet() -> Progress:
    return Progress("", io.StringIO())


class StoreMachine(RuleBasedStateMachine):
    """What two nodes and a person at a command line can do to one store."""

    @initialize(filled=st.booleans())
    def begin(self, filled: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name)
        self.path = root / "out"
        self.spools = [Spool(root / f"spool{n}", f"node{n}", 1 << 30) for n in (1, 2)]
        self.stores = [new_store(self.path), Store.open(self.path)]
        add_all(self.stores[0], PROMPTS)
        self.stores[0].write_facts("f1", {})
        self.index = Index(self.stores[0], CAPTURE.name)
        self.upkeeps = [Upkeep(store, f"node{n + 1}") for n, store in enumerate(self.stores)]
        self.opened: list[Samples] = []
        self.names: dict[str, set[str]] = {}
        self.days = 0
        self.responses: dict[bytes, Response] = {}
        self.states: set[Key] = set()
        self.dead: dict[Key, Failure] = {}
        if filled:  # so that there is something to merge, to drop and to read from the beginning
            self.respond([0, 1, 2], 1, 0)
            self.respond([3, 4, 5], 1, 1)
            self.capture([0, 1], 1, 0)
            self.capture_on_both_nodes_at_once([2, 3, 4], [4, 5], 1, 1)
            self.fail([6, 7], 0, 1)
            self.fail([8], 1, 0)
            self.respond([7, 8], 1, 0)

    # What the writers do.

    def batch_of(self, picks: list[int], seed: int) -> list[Response]:
        return [make_response(PROMPTS[at], seed) for at in picks]

    def told_responses(self, batch: list[Response]) -> None:
        for response in batch:
            self.responses.setdefault(response.id, response)

    def commit_states(self, batch: list[Response], who: int, spool: Spool | None = None) -> None:
        spool = spool or self.spools[who]
        self.stores[who].commit_states([make_states(response, spool) for response in batch], spool)

    @rule(picks=PICKS, seed=SEEDS, who=WHO)
    def respond(self, picks: list[int], seed: int, who: int) -> None:
        batch = self.batch_of(picks, seed)
        new = {response.id for response in batch} - set(self.responses)
        assert self.stores[who].commit_responses(batch) == len(new)
        self.told_responses(batch)

    @rule(picks=PICKS, seed=SEEDS, who=WHO)
    def capture(self, picks: list[int], seed: int, who: int) -> None:
        batch = self.batch_of(picks, seed)
        self.commit_states(batch, who)
        self.states |= {(response.id, response.digest) for response in batch}

    @rule(picks=PICKS, others=PICKS, seed=SEEDS, who=WHO)
    def capture_on_both_nodes_at_once(self, picks: list[int], others: list[int], seed: int, who: int) -> None:
        """The other node commits while this one writes: what both have is stored twice, seen once."""
        batch, other = self.batch_of(picks, seed), self.batch_of(others, seed)
        unknown = [r for r in batch if (r.id, r.digest) not in self.states]

        def commit_other() -> None:
            self.commit_states(other, 1 - who)
            self.states.update((response.id, response.digest) for response in other)

        # Each file is looked at once before any is read: this is when the last one is.
        self.commit_states(batch, who, InterruptedSpool(self.spools[who], 2 * len(unknown), commit_other))
        self.states |= {(response.id, response.digest) for response in batch}

    def failures_of(self, picks: list[int], seed: int) -> list[Failure]:
        """Seed 0: failures to generate; else to capture that response."""
        return [
            make_failure(PROMPTS[at], make_response(PROMPTS[at], seed).digest if seed else None)
            for at in picks
        ]

    def made_good(self, key: Key) -> bool:
        return key in self.states if key[1] else key[0] in self.responses

    def told_failures(self, batch: list[Failure]) -> None:
        for failure in batch:
            key = (failure.id, failure.digest)
            if not self.made_good(key):
                self.dead.setdefault(key, failure)

    @rule(picks=PICKS, seed=st.integers(0, 2), who=WHO)
    def fail(self, picks: list[int], seed: int, who: int) -> None:
        batch = self.failures_of(picks, seed)
        self.stores[who].commit_failures(batch)
        self.told_failures(batch)

    @rule(who=WHO)
    def open_again(self, who: int) -> None:
        self.stores[who] = Store.open(self.path)
        self.upkeeps[who] = Upkeep(self.stores[who], f"node{who + 1}")

    # Killed while they do it: all of a batch is there, or nothing.

    @rule(picks=PICKS, seed=SEEDS, who=WHO, at=DEATHS)
    def respond_and_die(self, picks: list[int], seed: int, who: int, at: KillAt) -> None:
        batch = self.batch_of(picks, seed)
        done = killed(lambda: self.stores[who].commit_responses(batch) and None, at)
        new = [response for response in batch if response.id not in self.responses]
        seen = Store.open(self.path)
        if done or (new and self.has_response(seen, new[0])):
            self.told_responses(batch)
        self.open_again(who)

    def has_response(self, store: Store, response: Response) -> bool:
        try:
            return store.response(response.id).digest == response.digest
        except KeyError:
            return False

    @rule(picks=PICKS, seed=SEEDS, who=WHO, at=DEATHS)
    def capture_and_die(self, picks: list[int], seed: int, who: int, at: KillAt) -> None:
        batch = self.batch_of(picks, seed)
        new = [(r.id, r.digest) for r in batch if (r.id, r.digest) not in self.states]
        done = killed(lambda: self.commit_states(batch, who), at)
        states = Store.open(self.path)._states
        if done or (new and states.known(CAPTURE.name, new[:1])[0]):
            self.states |= {(response.id, response.digest) for response in batch}
        self.open_again(who)

    @rule(picks=PICKS, seed=st.integers(0, 2), who=WHO, at=DEATHS)
    def fail_and_die(self, picks: list[int], seed: int, who: int, at: KillAt) -> None:
        batch = self.failures_of(picks, seed)
        keys = [(f.id, f.digest) for f in batch]
        new = [key for key in keys if key not in self.dead and not self.made_good(key)]
        done = killed(lambda: self.stores[who].commit_failures(batch) and None, at)
        said = {(f.id, f.digest) for f in Store.open(self.path).failures()}
        if done or (new and new[0] in said):
            self.told_failures(batch)
        self.open_again(who)

    # Compactions.

    def clock(self) -> float:
        return time.time() + self.days * KEPT_S + self.days

    @rule(kept_s=st.sampled_from([0.0, KEPT_S]))
    def compact(self, kept_s: float) -> None:
        report = compact(self.path, quiet(), kept_s=kept_s, clock=self.clock)
        folders = {folder.folder: folder for folder in report.folders}
        assert all(folder.segments_after <= 1 for folder in report.folders), "all of it is small"
        assert folders["responses"].left == []
        good = {(f.id, f.digest) for f in self.stores[0].failures()}
        assert good == {key for key in self.dead if not self.made_good(key)}

    @rule(kept_s=st.sampled_from([0.0, KEPT_S]), at=DEATHS)
    def compact_and_die(self, kept_s: float, at: KillAt) -> None:
        killed(lambda: compact(self.path, quiet(), kept_s=kept_s, clock=self.clock) and None, at)

    @rule(picks=PICKS, seed=SEEDS, who=WHO)
    def commit_while_a_compaction_works(self, picks: list[int], seed: int, who: int) -> None:
        batch = self.batch_of(picks, seed)

        def commit() -> None:
            self.respond(picks, seed, who)
            self.commit_states(batch, who)
            self.states.update((response.id, response.digest) for response in batch)

        progress = Interrupted(commit)
        compact(self.path, progress, clock=self.clock)

    @rule(who=WHO)
    def merge_while_a_compaction_works(self, who: int) -> None:
        """As on a file system without locks: the one that comes second throws its work away."""
        free = Upkeep(Store.open(self.path), f"node{who + 1}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(upkeep, "only_one", _no_lock)
            patch.setattr(upkeep, "MANY", 1)
            patch.setattr(compaction_plan, "MANY", 1)
            compact(self.path, Interrupted(lambda: list(free.look()) and None), clock=self.clock)

    @rule(who=WHO, many=st.integers(1, 3))
    def a_sink_merges_its_own(self, who: int, many: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(upkeep, "MANY", many)
            patch.setattr(compaction_plan, "MANY", many)
            list(self.upkeeps[who].look())

    @rule()
    def a_day_passes_and_a_sink_sweeps(self) -> None:
        self.days += 1
        self.stores[0].delete_replaced(now=self.clock())
        self.stores[0].sweep_staging(0)
        assert list((self.path / ".staging").iterdir()) == []

    # Readers.

    @precondition(lambda self: self.states and len(self.opened) < 3)
    @rule()
    def open_for_training(self) -> None:
        self.opened.append(storage.open(self.path))

    @rule(choice=st.integers(0, 10**9), mask=st.integers(1, 255))
    def damage_is_found(self, choice: int, mask: int) -> None:
        hidden = set()
        folders = self.stores[0].segment_folders()
        from storage.replaced import replaced

        for folder in folders:
            hidden |= {one.path for one in replaced(folder)}
        files = [
            file
            for folder in folders
            for name in list_segments(folder)
            if folder / str(name) not in hidden
            for file in sorted((folder / str(name)).rglob("c.*"))
        ]
        if not files:
            return
        path = files[choice % len(files)]
        good = path.read_bytes()
        at = choice % len(good)
        path.write_bytes(good[:at] + bytes([good[at] ^ mask]) + good[at + 1 :])
        found = verify(self.path, quiet()).problems
        path.write_bytes(good)
        assert str(path.relative_to(self.path).parents[1]) in {problem.segment for problem in found}

    # What must hold after every step.

    def expected(self, key: bytes) -> Outcome:
        return outcome_of(key, self.responses, self.states, self.dead)

    @invariant()
    def every_reader_sees_the_model(self) -> None:
        if not hasattr(self, "index"):
            return
        outcomes = [self.expected(prompt.id) for prompt in PROMPTS]
        fresh = Index(Store.open(self.path), CAPTURE.name)
        for index in (fresh, self.index):
            index.refresh()
            assert index.dataset("B1").outcome.tolist() == outcomes
        for store in (*self.stores, Store.open(self.path)):
            for key, response in self.responses.items():
                assert_same(store.response(key), response)
            said = {(f.id, f.digest): f for f in store.failures()}
            assert {key for key in self.dead if not self.made_good(key)} <= said.keys() <= self.dead.keys()
            for key, failure in said.items():
                assert_same(failure, self.dead[key])
        stored = [p.id for p, outcome in zip(PROMPTS, outcomes, strict=True) if outcome is Outcome.STORED]
        now = [storage.open(self.path)] if self.states else []
        assert all(samples.ids == stored for samples in now)
        for samples in (*now, *self.opened):
            assert set(samples.ids) <= set(stored)
            assert samples.lengths.tolist() == [len(self.responses[key].tokens) for key in samples.ids]
            for sample in samples:
                assert np.array_equal(sample.states, tensor_of(self.responses[sample.id]))
                assert np.array_equal(sample.tokens, self.responses[sample.id].tokens)

    @invariant()
    def no_name_is_ever_used_again(self) -> None:
        """A name that was there and went does not come back."""
        if not hasattr(self, "index"):
            return
        for folder in self.stores[0].segment_folders():
            names = {str(name) for name in list_segments(folder)}
            gone = self.names.setdefault(f"{folder}.gone", set())
            assert not names & gone
            gone |= self.names.get(str(folder), set()) - names
            self.names[str(folder)] = names

    @invariant()
    def verify_finds_nothing(self) -> None:
        if hasattr(self, "index"):
            report = verify(self.path, quiet())
            assert report.problems == ()
            assert report.samples["responses"] == len(self.responses)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


class _no_lock:  # noqa: N801 - stands for a function
    """A lock as a file system without locks gives it: everybody has it."""

    def __init__(self, folder: Path) -> None:
        pass

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *error: object) -> None:
        pass


HEALTH = list(HealthCheck)


@pytest.mark.timeout(600)
class TestStore(StoreMachine.TestCase):
    """Some of it, in every test run."""

    settings = settings(max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=HEALTH)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestStoreLong(StoreMachine.TestCase):
    """The same for longer."""

    settings = settings(max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=HEALTH)
