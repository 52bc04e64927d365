"""A process that stands still before its rename until the name it saw free was taken, merged and deleted."""

from collections.abc import Callable
from pathlib import Path

import pytest
from compact_making import compacted, names
from store_making import CAPTURE, add_all, make_failure, make_prompts, make_response, make_states, new_store

from storage.index import Index, Outcome
from storage.sample import Response
from storage.spool import Spool
from storage.store import Store

Commit = Callable[[Store, Response, Spool], object]


def commit_response(store: Store, response: Response, spool: Spool) -> object:
    return store.commit_responses([response])


def commit_failure(store: Store, response: Response, spool: Spool) -> object:
    return store.commit_failures([make_failure(store.prompt("B1", place_of(store, response)))])


def commit_states(store: Store, response: Response, spool: Spool) -> object:
    return store.commit_states([make_states(response, spool)], spool)


def place_of(store: Store, response: Response) -> int:
    return list(store.prompt_ids("B1")).index(response.id)


class Stopped(Store):
    """Goes on with a commit only after `meanwhile`, once: at the last look at the run, before the rename."""

    meanwhile: Callable[[], None] | None = None
    looks_before = 0

    def check_run(self) -> None:
        super().check_run()
        self.looks_before -= 1
        if self.meanwhile is not None and self.looks_before < 0:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()


@pytest.mark.parametrize(
    ("commit", "folder", "outcome"),
    [
        (commit_response, "responses", Outcome.RESPONDED),
        (commit_failure, "failures", Outcome.DEAD),
        (commit_states, f"states/{CAPTURE.name}", Outcome.STORED),
    ],
    ids=["responses", "failures", "states"],
)
def test_what_it_commits_then_is_visible_all_the_same(
    tmp_path: Path, commit: Commit, folder: str, outcome: Outcome
):
    store, spool = new_store(tmp_path / "out"), Spool(tmp_path / "spool", "node1", 1 << 30)
    prompts = make_prompts(4)
    add_all(store, prompts)
    responses = [make_response(prompt) for prompt in prompts]
    if outcome is Outcome.STORED:
        store.commit_responses(responses)
    commit(store, responses[0], spool)
    slow = Stopped(store.path, store.run)

    def meanwhile() -> None:
        for response in responses[1:3]:
            commit(store, response, spool)
        compacted(store.path, kept_s=0)
        assert not any(name.endswith("2") for name in names(store.path / folder))

    slow.meanwhile, slow.looks_before = meanwhile, int(outcome is Outcome.STORED)
    commit(slow, responses[3], spool)
    assert slow.meanwhile is None
    index = Index(Store.open(store.path), CAPTURE.name)
    index.refresh()
    assert index.dataset("B1").outcome.tolist() == [outcome] * 4
