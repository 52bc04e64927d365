"""Spool files that are lost: found before anything is written, or all at once; the rest is stored."""

from pathlib import Path

import pytest
from store_making import add_all, make_prompts, make_response, make_states, new_store, tensor_of

import storage
from storage import states_segments
from storage.sample import States
from storage.segment import Staging
from storage.spool import Spool
from storage.spool_file import HEADER_BYTES
from storage.store import Store


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Staging]:
    """The segments that were begun."""
    begun: list[Staging] = []

    class Counted(Staging):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            begun.append(self)

    monkeypatch.setattr(states_segments, "Staging", Counted)
    return begun


def batch_of(path: Path, count: int = 12) -> tuple[Store, Spool, list[States]]:
    store, spool = new_store(path / "out"), Spool(path / "spool", "node1", 1 << 30)
    prompts = make_prompts(count)
    add_all(store, prompts)
    responses = [make_response(prompt) for prompt in prompts]
    store.commit_responses(responses)
    return store, spool, [make_states(response, spool) for response in responses]


def damage(spool: Spool, states: States) -> None:
    path = spool.folder / states.spool.name
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 5] ^= 1
    path.write_bytes(data)


def assert_stored(store: Store, batch: list[States]) -> None:
    samples = storage.open(store.path)
    assert sorted(samples.ids) == sorted(states.id for states in batch)
    for states in batch:
        assert (samples.sample(states.id).states == tensor_of(store.response(states.id))).all()


def test_a_whole_batch_is_written_once(tmp_path: Path, written: list[Staging]):
    store, spool, batch = batch_of(tmp_path)
    assert len(store.commit_states(batch, spool).stored) == 12
    assert len(written) == 1
    assert_stored(store, batch)


def test_files_that_are_gone_or_short_are_found_before_anything_is_written(
    tmp_path: Path, written: list[Staging]
):
    store, spool, batch = batch_of(tmp_path)
    for states in batch[:5]:
        (spool.folder / states.spool.name).unlink()
    for states in batch[5:7]:
        path = spool.folder / states.spool.name
        path.write_bytes(path.read_bytes()[:-1])
    (spool.folder / batch[7].spool.name).write_bytes((spool.folder / batch[8].spool.name).read_bytes())
    done = store.commit_states(batch, spool)
    assert set(done.lost) == set(batch[:8])
    assert len(written) == 1
    assert_stored(store, batch[8:])


def test_all_that_do_not_match_their_checksum_cost_one_more_writing_together(
    tmp_path: Path, written: list[Staging]
):
    store, spool, batch = batch_of(tmp_path)
    for states in batch[::2]:
        damage(spool, states)
    done = store.commit_states(batch, spool)
    assert set(done.lost) == set(batch[::2])
    assert list(done.stored) == batch[1::2]
    assert len(written) == 2
    assert_stored(store, batch[1::2])


def test_a_batch_of_which_nothing_is_left_writes_nothing(tmp_path: Path, written: list[Staging]):
    store, spool, batch = batch_of(tmp_path)
    for states in batch:
        (spool.folder / states.spool.name).unlink()
    done = store.commit_states(batch, spool)
    assert (len(done.lost), done.stored, written) == (12, (), [])
    assert store.captures() == ()
