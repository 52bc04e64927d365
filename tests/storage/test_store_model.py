"""The store and its index against a perfect model in memory, through random sequences of commits."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_making import (
    CAPTURE,
    assert_same,
    dataset_spec,
    make_failure,
    make_prompts,
    make_response,
    make_states,
    new_store,
    outcome_of,
    tensor_of,
)

import storage
from storage.index import Index, Outcome
from storage.sample import Response
from storage.spool import Spool
from storage.store import Store

NAMES = ("B1", "B2")
PROMPTS = {name: make_prompts(12, name, seed=number) for number, name in enumerate(NAMES)}
PICKS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 11)), min_size=1, max_size=6)
SEEDS = st.integers(1, 2)


class StoreModel(RuleBasedStateMachine):
    """Two stores on one folder, as two processes have them; which acts is chosen at random."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name)
        self.spool = Spool(path / "spool", "node1", 1 << 30)
        self.stores = [new_store(path / "out"), Store.open(path / "out")]
        self.index = Index(self.stores[0], CAPTURE.name)
        for name in NAMES:
            self.stores[0].begin_dataset(dataset_spec(name))
        self.added = dict.fromkeys(NAMES, 0)
        self.responses: dict[bytes, Response] = {}
        self.states: set[tuple[bytes, bytes]] = set()
        self.dead: set[tuple[bytes, bytes | None]] = set()

    def picked(self, picks: list[tuple[str, int]]) -> list:
        return [PROMPTS[name][at] for name, at in picks if at < self.added[name]]

    @rule(name=st.sampled_from(NAMES), count=st.integers(0, 7), who=st.integers(0, 1))
    def add_prompts(self, name: str, count: int, who: int) -> None:
        first = self.stores[who].reading_state(name).next_row
        assert first == self.added[name]
        new = PROMPTS[name][first : first + count]
        self.added[name] += len(new)
        done = self.added[name] == len(PROMPTS[name])
        self.stores[who].add_prompts(name, new, next_row=self.added[name], complete=done, dropped={})

    @rule(picks=PICKS, seed=SEEDS, who=st.integers(0, 1))
    def respond(self, picks: list[tuple[str, int]], seed: int, who: int) -> None:
        batch = [make_response(prompt, seed) for prompt in self.picked(picks)]
        new = {response.id for response in batch} - set(self.responses)
        assert self.stores[who].commit_responses(batch) == len(new)
        for response in batch:
            self.responses.setdefault(response.id, response)

    @rule(picks=PICKS, seed=SEEDS, who=st.integers(0, 1))
    def capture(self, picks: list[tuple[str, int]], seed: int, who: int) -> None:
        """States may come before their response, or belong to one that nobody keeps."""
        responses = [make_response(prompt, seed) for prompt in self.picked(picks)]
        batch = [make_states(response, self.spool) for response in responses]
        done = self.stores[who].commit_states(batch, self.spool)
        keys = {(states.id, states.digest) for states in batch}
        assert {(states.id, states.digest) for states in done.stored} == keys - self.states
        assert len(done.stored) + len(done.duplicate) == len(batch)
        self.states |= keys

    @rule(picks=PICKS, seed=st.integers(0, 2), who=st.integers(0, 1))
    def fail(self, picks: list[tuple[str, int]], seed: int, who: int) -> None:
        prompts = self.picked(picks)
        batch = [
            make_failure(prompt, make_response(prompt, seed).digest if seed else None) for prompt in prompts
        ]
        new = {
            key
            for key in ((failure.id, failure.digest) for failure in batch)
            if key not in self.dead and not (key in self.states if key[1] else key[0] in self.responses)
        }
        assert self.stores[who].commit_failures(batch) == len(new)
        self.dead |= new

    def expected(self, key: bytes) -> Outcome:
        return outcome_of(key, self.responses, self.states, self.dead)

    @invariant()
    def the_index_says_what_the_model_says(self) -> None:
        if not hasattr(self, "index"):
            return
        fresh = Index(Store.open(self.stores[0].path), CAPTURE.name)
        fresh.refresh()
        self.index.refresh()
        assert not self.index.refresh()
        for index in (self.index, fresh):
            for name in NAMES:
                prompts, dataset = PROMPTS[name][: self.added[name]], index.dataset(name)
                assert dataset.ids == [prompt.id for prompt in prompts]
                assert dataset.prompt_tokens.tolist() == [len(prompt.tokens) for prompt in prompts]
                assert dataset.outcome.tolist() == [self.expected(prompt.id) for prompt in prompts]
                tokens = [
                    len(self.responses[prompt.id].tokens) if prompt.id in self.responses else 0
                    for prompt in prompts
                ]
                assert dataset.sample_tokens.tolist() == tokens

    @invariant()
    def every_store_gives_the_first_response(self) -> None:
        if not hasattr(self, "index"):
            return
        for key, response in self.responses.items():
            for store in self.stores:
                assert_same(store.response(key), response)

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        samples = storage.open(self.stores[0].path) if self.states else ()
        stored = [
            prompt.id
            for name in NAMES
            for prompt in PROMPTS[name][: self.added[name]]
            if self.expected(prompt.id) is Outcome.STORED
        ]
        assert [sample.id for sample in samples] == stored
        for sample in samples:
            assert np.array_equal(sample.states, tensor_of(self.responses[sample.id]))
            assert np.array_equal(sample.tokens, self.responses[sample.id].tokens)
        self.folder.cleanup()


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(
    max_examples=10, stateful_step_count=10, suppress_health_check=list(HealthCheck)
)
