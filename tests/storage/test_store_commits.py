"""Commits to the store: what is stored comes back, once, whoever else commits meanwhile."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
from store_making import (
    CAPTURE,
    SPEC,
    add_all,
    assert_same,
    dataset_spec,
    make_failure,
    make_prompts,
    make_response,
    make_states,
    new_store,
    tensor_of,
)

import storage
from storage.codec import Codec
from storage.errors import DamagedError, UnavailableError, UnsuitableError, UsageError
from storage.index import Index, Outcome
from storage.responses import stage_responses
from storage.sample import Finish, Prompt
from storage.segment import SegmentName, Staging, list_segments
from storage.spool import Spool
from storage.store import Store
from storage.tokens import as_tokens, prompt_id, response_digest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "out")


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", "node1", 1 << 30)


def names(store: Store, folder: str) -> list[str]:
    return [str(name) for name in list_segments(store.path / folder)]


def test_prompts_come_back_in_order_over_several_segments(store: Store):
    prompts = make_prompts(1200)
    store.begin_dataset(dataset_spec())
    store.add_prompts("B1", prompts[:700], next_row=705, complete=False, dropped={"too long": 5})
    store.add_prompts("B1", prompts[700:], next_row=1210, complete=False, dropped={"too long": 2, "empty": 3})
    store.add_prompts("B1", [], next_row=1210, complete=True, dropped={})
    again = Store.open(store.path)
    for stored, prompt in zip(again.prompts("B1"), prompts, strict=True):
        assert_same(stored, prompt)
    assert list(again.prompt_ids("B1")) == [prompt.id for prompt in prompts]
    assert again.prompt_tokens("B1") == sum(len(prompt.tokens) for prompt in prompts)
    for stored, prompt in zip(again.prompts("B1", 695, 705), prompts[695:705], strict=True):
        assert_same(stored, prompt)
    assert_same(again.prompt("B1", 1199), prompts[1199])
    with pytest.raises(IndexError):
        again.prompt("B1", 1200)
    state = again.reading_state("B1")
    assert (state.count, state.next_row, state.complete) == (1200, 1210, True)
    assert state.dropped == {"too long": 7, "empty": 3}


def test_a_prompt_that_was_given_its_answer_says_where_it_begins(store: Store):
    tokens = as_tokens([1, 2, 3, 4])
    given = [
        Prompt(id=bytes([at]) * 16, dataset="A1", tokens=tokens, spans=(), source_row=at, given_from=begin)
        for at, begin in enumerate([0, 3, None])
    ]
    add_all(store, given, "A1")
    assert [prompt.given_from for prompt in store.prompts("A1")] == [0, 3, None]


def test_a_dataset_not_begun_or_not_read_has_nothing(store: Store):
    assert store.dataset_spec("B1") is None
    assert store.reading_state("B1").count == 0
    store.begin_dataset(dataset_spec())
    store.begin_dataset(dataset_spec())
    assert store.dataset_names() == ("B1",)
    assert store.dataset_spec("B1") == dataset_spec()
    assert list(store.prompts("B1")) == []


def test_another_source_under_the_same_name_is_refused_and_the_difference_named(store: Store):
    store.begin_dataset(dataset_spec())
    with pytest.raises(UnsuitableError, match=r"source: `file:b1.jsonl` → `file:other.jsonl`") as caught:
        store.begin_dataset(dataset_spec(source="file:other.jsonl"))
    assert caught.value.code == "dataset.other"
    with pytest.raises(UsageError):
        store.begin_dataset(dataset_spec("../x"))


def test_two_readers_of_one_source_do_not_store_it_twice(store: Store):
    prompts = make_prompts(10)
    other = Store.open(store.path)
    store.begin_dataset(dataset_spec())
    for each in (store, other):
        assert each.reading_state("B1").next_row == 0
    store.add_prompts("B1", prompts, next_row=10, complete=True, dropped={})
    with pytest.raises(UnavailableError) as caught:
        other.add_prompts("B1", prompts, next_row=10, complete=True, dropped={})
    assert caught.value.code == "dataset.busy"
    assert other.reading_state("B1").count == 10


def test_a_response_comes_back_with_all_its_fields(store: Store):
    responses = [make_response(prompt) for prompt in make_prompts(30)]
    responses[3] = replace(responses[3], text="", spans=(), facts_id="", finish=Finish.GIVEN, prompt_length=0)
    assert store.commit_responses(responses) == 30
    for response in responses:
        assert_same(store.response(response.id), response)
        assert_same(Store.open(store.path).response(response.id), response)
    with pytest.raises(KeyError):
        store.response(bytes(16))


def test_text_that_is_not_unicode_does_not_stop_a_commit(store: Store):
    response = replace(make_response(make_prompts(1)[0]), text="a\ud800b")
    store.commit_responses([response])
    assert store.response(response.id).text == "a?b"


def test_only_the_first_response_to_a_prompt_is_ever_visible(store: Store):
    first, second = (make_response(make_prompts(1)[0], seed) for seed in (1, 2))
    other = Store.open(store.path)
    assert store.commit_responses([first, second]) == 1
    assert store.commit_responses([second]) == 0
    assert other.commit_responses([second]) == 0
    assert_same(other.response(first.id), first)
    assert names(store, "responses") == ["s-00000001"]


def test_a_writer_that_loses_the_rename_drops_what_the_winner_stored(store: Store):
    responses = [make_response(prompt) for prompt in make_prompts(9)]
    other = Store.open(store.path)
    assert other.commit_responses(responses[:1]) == 1
    assert store.commit_responses(responses[1:5]) == 4
    assert other.commit_responses(responses[3:7]) == 2
    assert store.commit_responses(responses) == 2
    assert names(store, "responses") == [f"s-{seq:08}" for seq in range(1, 5)]


def test_a_response_that_a_compaction_has_moved_is_found_again(store: Store):
    responses = [make_response(prompt) for prompt in make_prompts(4)]
    for part in (responses[:2], responses[2:]):
        store.commit_responses(part)
    merged = Store.open(store.path)
    assert store.response(responses[3].id).id == responses[3].id
    with Staging(store.path, "merge", store.codec) as staging:
        stage_responses(staging, responses)
        attributes = json.loads((staging.path / "zarr.json").read_text())["attributes"]
        staging.finish({**attributes, "replaces": ["s-00000001", "s-00000002"]})
        assert staging.commit(store.path / "responses", SegmentName(node=None, seq=3))
    for name in ("s-00000001", "s-00000002"):
        shutil.rmtree(store.path / "responses" / name)
    for each in (store, merged, Store.open(store.path)):
        for response in responses:
            assert_same(each.response(response.id), response)
        assert each.commit_responses(responses) == 0


@pytest.mark.parametrize("trouble", ["gone", "damaged"])
def test_a_moment_of_trouble_while_looking_leaves_no_gap_in_what_is_known(store: Store, trouble: str):
    prompts = make_prompts(9)
    add_all(store, prompts)
    responses = [make_response(prompt) for prompt in prompts]
    for part in (responses[:3], responses[3:6], responses[6:]):
        store.commit_responses(part)
    store.commit_failures([make_failure(make_prompts(1, seed=5)[0])])
    other, index = Store.open(store.path), Index(Store.open(store.path), None)
    path = store.path / "responses/s-00000002/id/c.0.0"
    whole = path.read_bytes()
    path.unlink() if trouble == "gone" else path.write_bytes(b"x" + whole[1:])
    for look in (lambda: other.commit_responses(responses), index.refresh):
        with pytest.raises(DamagedError):
            look()
    path.write_bytes(whole)
    assert other.commit_responses(responses) == 0
    assert index.refresh()
    assert index.dataset("B1").outcome.tolist() == [Outcome.RESPONDED] * 9
    assert not index.refresh()


def test_an_empty_batch_commits_nothing(store: Store, spool: Spool):
    assert store.commit_responses([]) == 0
    assert store.commit_failures([]) == 0
    assert store.commit_states([], spool).stored == ()
    assert names(store, "responses") == names(store, "failures") == []


@pytest.mark.parametrize("codec", list(Codec))
def test_states_are_read_bit_for_bit_by_us_zarr_and_tensorstore(tmp_path: Path, spool: Spool, codec: Codec):
    store = new_store(tmp_path / "out", codec=codec)
    prompts = make_prompts(25)
    add_all(store, prompts)
    responses = [make_response(prompt) for prompt in prompts]
    store.commit_responses(responses)
    done = store.commit_states([make_states(response, spool) for response in responses], spool)
    assert len(done.stored) == 25
    samples = storage.open(store.path)
    group = zarr.open(str(store.path), mode="r")["states/eagle3/s-node1-00000001"]
    spec = {"driver": "file", "path": str(store.path / "states/eagle3/s-node1-00000001/states")}
    by_tensorstore = tensorstore.open({"driver": "zarr3", "kvstore": spec}, read=True).result()
    offset = group["offset"][:]
    for row, response in enumerate(responses):
        tensor = tensor_of(response)
        assert np.array_equal(samples.sample(response.id).states, tensor)
        assert np.array_equal(group["states"][offset[row] : offset[row + 1]], tensor)
        assert np.array_equal(by_tensorstore[offset[row] : offset[row + 1]].read().result(), tensor)
    assert group.attrs["hs_indices"] == [2, 5, 8]
    assert group.attrs["norm"] == "post"
    assert group["states"].metadata.codecs[0].index_location.value == "end"


def test_every_array_of_a_store_opens_with_zarr(store: Store, spool: Spool):
    prompts = make_prompts(5)
    add_all(store, prompts)
    responses = [make_response(prompt) for prompt in prompts]
    store.commit_responses(responses)
    store.commit_states([make_states(responses[0], spool)], spool)
    store.commit_failures([make_failure(prompts[1], responses[1].digest)])
    root = zarr.open(str(store.path), mode="r")
    segment = root["responses/s-00000001"]
    offset = segment["offset"][:]
    for row, response in enumerate(responses):
        assert segment["id"][row].tobytes() == response.id
        assert np.array_equal(segment["tokens"][offset[row] : offset[row + 1]], response.tokens)
    for path in ("prompts/B1/s-00000001", "states/eagle3/s-node1-00000001", "failures/s-00000001"):
        for _, array in root[path].arrays():
            array[:]


def test_states_are_stored_once_for_a_response_and_again_for_another_one(store: Store, spool: Spool):
    one, other = (make_response(make_prompts(1)[0], seed) for seed in (1, 2))
    states, again, of_other = make_states(one, spool), make_states(one, spool), make_states(other, spool)
    done = store.commit_states([states, again], spool)
    assert (done.stored, done.duplicate) == ((states,), (again,))
    done = Store.open(store.path).commit_states([again, of_other], spool)
    assert (done.stored, done.duplicate) == ((of_other,), (again,))
    assert spool.check_values(states.spool).ok, "the sink deletes, not the store"


def test_states_lost_in_the_spool_do_not_cost_the_others(store: Store, spool: Spool):
    responses = [make_response(prompt) for prompt in make_prompts(12)]
    batch = [make_states(response, spool) for response in responses]
    spool.delete(batch[3].spool)
    damaged = spool.folder / batch[8].spool.name
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    done = store.commit_states(batch, spool)
    assert set(done.lost) == {batch[3], batch[8]}
    assert len(done.stored) == 10
    assert store.commit_states([batch[3]], spool).lost == (batch[3],)
    assert list((store.path / ".staging").iterdir()) == []


@pytest.mark.parametrize(("value", "code"), [(0x7FC0, "states.not_finite"), (0, "states.zero")])
def test_states_no_forward_pass_gives_are_not_stored_and_do_not_cost_the_others(
    store: Store, spool: Spool, value: int, code: str
):
    responses = [make_response(prompt) for prompt in make_prompts(6)]
    batch = [make_states(response, spool) for response in responses]
    for at in (2, 4):
        tensor = tensor_of(responses[at])
        tensor[1, 1] = value
        batch[at] = make_states(responses[at], spool, tensor)
    done = store.commit_states(batch, spool)
    assert set(done.unfit) == {(batch[2], code), (batch[4], code)}
    assert len(done.stored) == 4
    assert done.lost == ()
    assert list((store.path / ".staging").iterdir()) == []


def test_states_of_other_layers_or_facts_are_kept_apart_or_named(store: Store, spool: Spool):
    responses = [make_response(prompt) for prompt in make_prompts(4)]
    batch = [make_states(response, spool, facts_id=f"f{at % 2}") for at, response in enumerate(responses)]
    batch[3] = replace(batch[3], hs_indices=(1, 2, 3))
    assert len(store.commit_states(batch, spool).stored) == 4
    root = zarr.open(str(store.path), mode="r")["states/eagle3"]
    first, second = root["s-node1-00000001"], root["s-node1-00000002"]
    assert [first.attrs["facts"][at] for at in first["facts"][:]] == ["f0", "f1", "f0"]
    assert second.attrs["hs_indices"] == [1, 2, 3]


def test_each_node_has_names_of_its_own_and_the_first_of_two_is_read(store: Store, tmp_path: Path):
    prompts = make_prompts(1)
    add_all(store, prompts)
    response = make_response(prompts[0])
    store.commit_responses([response])
    left, right = Spool(tmp_path / "a", "node-a-1", 1 << 30), Spool(tmp_path / "b", "node-b", 1 << 30)
    other = Store.open(store.path)
    assert other.commit_states([], right).stored == ()
    batch = make_states(response, left), make_states(response, right)
    assert store.commit_states([batch[0]], left).stored
    assert other.commit_states([batch[1]], right).duplicate
    assert names(store, "states/eagle3") == ["s-node-a-1-00000001"]


def test_dead_letters_come_back_and_are_beaten_by_what_is_stored(store: Store, spool: Spool):
    prompts = make_prompts(4)
    add_all(store, prompts)
    responses = [make_response(prompt) for prompt in prompts]
    dead = [make_failure(prompts[0]), make_failure(prompts[1], responses[1].digest)]
    assert store.commit_failures([*dead, dead[0]]) == 2
    assert store.commit_failures(dead) == 0
    for stored, failure in zip(Store.open(store.path).failures(), dead, strict=True):
        assert_same(stored, failure)
    store.commit_responses(responses[:3])
    store.commit_states([make_states(responses[1], spool)], spool)
    assert store.commit_failures([make_failure(prompts[2])]) == 0, "it has a response"
    assert store.commit_failures([replace(dead[1], code="other")]) == 0, "it has its states"
    index = Index(store, CAPTURE.name)
    index.refresh()
    expected = [Outcome.RESPONDED, Outcome.STORED, Outcome.RESPONDED, Outcome.NONE]
    assert index.dataset("B1").outcome.tolist() == expected


def test_facts_are_written_once(store: Store):
    store.write_facts("f1", {"version": "1"})
    store.write_facts("f1", {"version": "2"})
    assert (store.path / "facts" / "f1.json").read_text() == '{\n  "version": "1"\n}\n'
    with pytest.raises(UsageError):
        store.write_facts("../run", {})


def test_creating_a_store_again_changes_nothing(store: Store):
    before = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    assert new_store(store.path).run == store.run
    assert {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()} == before


def test_a_folder_without_a_run_is_missing(tmp_path: Path):
    with pytest.raises(UnavailableError) as caught:
        Store.open(tmp_path)
    assert caught.value.code == "run.missing"
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError) as caught:
        Store.open(tmp_path / "file")
    assert caught.value.code == "output.unreadable"


def test_ids_follow_their_definition_byte_by_byte():
    from hashlib import blake2b

    tokens = as_tokens([1, 70_000])
    raw = b"\x01\x00\x00\x00\x70\x11\x01\x00"
    head = b"\x02\x00\x00\x00B1" + b"\x03\x00\x00\x00" + b"\x00\x00\x00\x00"
    assert prompt_id("B1", tokens, occurrence=3) == blake2b(head + raw, digest_size=16).digest()
    assert response_digest(tokens) == blake2b(raw, digest_size=16).digest()
    assert SPEC.fingerprint == replace(SPEC).fingerprint
