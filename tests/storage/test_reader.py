"""Reading for training: the same samples in the same order, whatever happened while writing."""

import json
import multiprocessing
import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_making import (
    CAPTURE,
    SPEC,
    add_all,
    make_prompts,
    make_response,
    make_states,
    new_store,
    tensor_of,
    whole_store,
)

import storage
from storage.errors import DamagedError, UnavailableError, UsageError
from storage.run import StatesMode
from storage.segment import Segment, SegmentName, Staging, list_segments
from storage.spool import Spool
from storage.states import StatesColumns
from storage.store import Store


def test_samples_come_by_index_id_and_iteration_in_the_order_of_prompts(tmp_path: Path):
    _, responses = whole_store(tmp_path / "out")
    samples = storage.open(str(tmp_path / "out"))
    assert len(samples) == 20
    assert samples.capture == "eagle3"
    assert samples.ids == [response.id for response in responses]
    assert samples.lengths.tolist() == [len(response.tokens) for response in responses]
    for at, (sample, response) in enumerate(zip(samples, responses, strict=True)):
        assert np.array_equal(sample.tokens, response.tokens)
        assert sample.tokens.dtype == np.int32
        assert sample.states.dtype == np.uint16
        assert np.array_equal(sample.states, tensor_of(response))
        assert (sample.prompt_length, sample.spans) == (response.prompt_length, response.spans)
        assert (sample.finish, sample.dataset, sample.text) == (response.finish, "B1", response.text)
        assert samples.sample(at).id == samples.sample(response.id).id == samples[at - 20].id == sample.id
    assert samples.sample(responses[3].id.hex()).id == responses[3].id
    assert "20 samples" in repr(samples)
    for absent in (bytes(16), "00" * 16, "B1"):
        with pytest.raises(KeyError):
            samples.sample(absent)
    for at in (20, -21):
        with pytest.raises(IndexError):
            samples[at]


def test_bf16_bits_are_the_numbers_they_stand_for(tmp_path: Path):
    store, spool = new_store(tmp_path / "out"), Spool(tmp_path / "spool", "node1", 1 << 30)
    prompts = make_prompts(1)
    add_all(store, prompts)
    response = make_response(prompts[0])
    values = np.full((len(response.tokens), 3, 16), 1.5, np.float32)
    values[:, 1] = -2.25
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    store.commit_responses([response])
    store.commit_states([make_states(response, spool, bits)], spool)
    states = storage.open(store.path)[0].states
    assert np.array_equal((states.astype(np.uint32) << 16).view(np.float32), values)


def test_the_order_does_not_depend_on_who_finished_first(tmp_path: Path):
    store, spool = new_store(tmp_path / "out"), Spool(tmp_path / "spool", "node1", 1 << 30)
    expected = []
    for name in ("B2", "A1"):
        prompts = make_prompts(8, name)
        add_all(store, prompts, name)
        responses = [make_response(prompt) for prompt in prompts]
        expected = [response.id for response in responses] + expected
        for response in reversed(responses):
            store.commit_responses([response])
        store.commit_states([make_states(response, spool) for response in responses[::-1]], spool)
    assert storage.open(store.path).ids == expected


def test_only_whole_samples_are_given(tmp_path: Path):
    store, spool = new_store(tmp_path / "out"), Spool(tmp_path / "spool", "node1", 1 << 30)
    prompts = make_prompts(4)
    add_all(store, prompts)
    responses = [make_response(prompt) for prompt in prompts]
    store.commit_responses(responses[:2])
    assert len(storage.open(store.path)) == 0
    other = make_response(prompts[0], seed=5)
    store.commit_states([make_states(r, spool) for r in (other, *responses[1:3])], spool)
    assert storage.open(store.path).ids == [prompts[1].id]


def test_inline_tokens_are_cut_to_the_rows(tmp_path: Path):
    spec = replace(SPEC, states=StatesMode.INLINE)
    store, spool = new_store(tmp_path / "out", spec), Spool(tmp_path / "spool", "node1", 1 << 30)
    prompts = make_prompts(1)
    add_all(store, prompts)
    response = make_response(prompts[0])
    rows = len(response.tokens) - 1
    store.commit_states([make_states(response, spool, tensor_of(response, rows))], spool)
    store.commit_responses([response])
    samples = storage.open(store.path)
    assert samples.lengths.tolist() == [rows]
    assert np.array_equal(samples[0].tokens, response.tokens[:rows])
    assert samples[0].states.shape == (rows, 3, 16)
    assert samples[0].spans[-1].end == max(span.end for span in samples[0].spans) == rows


def test_a_run_without_states_gives_responses_alone(tmp_path: Path):
    store = new_store(tmp_path / "out", replace(SPEC, states=StatesMode.OFF, capture=None))
    prompts = make_prompts(5)
    add_all(store, prompts)
    responses = [make_response(prompt) for prompt in prompts[:3]]
    store.commit_responses(responses)
    samples = storage.open(store.path)
    assert samples.capture is None
    assert samples.ids == [response.id for response in responses]
    assert samples[0].states is None
    assert samples.lengths.tolist() == [len(response.tokens) for response in responses]


def test_a_capture_that_was_never_made_is_an_error_with_the_nearest_name(tmp_path: Path):
    whole_store(tmp_path / "out")
    assert len(storage.open(tmp_path / "out", capture="eagle3")) == 20
    with pytest.raises(UsageError) as caught:
        storage.open(tmp_path / "out", capture="eagle")
    assert caught.value.hint == "did you mean `eagle3`?"
    with pytest.raises(UnavailableError):
        storage.open(tmp_path / "nothing")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_loader_may_fork_after_reading_or_be_given_a_pickle(tmp_path: Path):
    _, responses = whole_store(tmp_path / "out")
    samples = storage.open(tmp_path / "out")
    samples.sample(0)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends as a failure
        same = all(
            np.array_equal(sample.states, tensor_of(r)) for sample, r in zip(samples, responses, strict=True)
        )
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        ids = pool.map(samples.sample, [3, 4])
        pool.close()
        pool.join()
    assert [sample.id for sample in ids] == [responses[3].id, responses[4].id]
    assert pickle.loads(pickle.dumps(samples)).ids == samples.ids


def merge(store: Store, spool: Spool) -> None:
    """What a compaction does to the states: one segment of all rows that replaces the others."""
    folder = store.path / "states" / CAPTURE.name
    segments = [Segment(folder, name) for name in list_segments(folder)]
    tensors = [StatesColumns(segment).read(row) for segment in segments for row in range(segment.samples)]
    with Staging(store.path, "merge", store.codec) as staging:
        flat = np.concatenate(tensors)
        with staging.stream("states", flat.shape) as writer:
            writer.append(flat)
            writer.close()
        for name in ("id", "digest", "crc32", "facts"):
            staging.plain(name, np.concatenate([segment.column(name) for segment in segments]))
        staging.plain("offset", np.concatenate([[0], np.cumsum([len(tensor) for tensor in tensors])]))
        staging.finish(
            {
                **segments[0].attributes,
                "samples": len(tensors),
                "replaces": [str(segment.name) for segment in segments],
            }
        )
        assert staging.commit(folder, SegmentName(node=spool.node, seq=len(segments) + 1))


def test_segments_merged_and_deleted_while_a_reader_is_open_are_found_again(tmp_path: Path):
    store, responses = whole_store(tmp_path / "out")
    samples = storage.open(store.path)
    samples.sample(0)
    merge(store, Spool(tmp_path / "spool", "node1", 1 << 30))
    reopened = storage.open(store.path)
    for name in ("s-node1-00000001", "s-node1-00000002"):
        shutil.rmtree(store.path / "states" / CAPTURE.name / name)
    for each in (samples, reopened, storage.open(store.path)):
        for sample, response in zip(each, responses, strict=True):
            assert np.array_equal(sample.states, tensor_of(response))


def test_a_file_that_is_gone_for_good_is_damage_and_not_a_sample_of_zeros(tmp_path: Path):
    store, _ = whole_store(tmp_path / "out")
    samples = storage.open(store.path)
    (store.path / "states/eagle3/s-node1-00000001/states/c.0.0.0").unlink()
    with pytest.raises(DamagedError) as caught:
        samples.sample(0)
    assert caught.value.code == "file.missing"
    assert samples.sample(19).states is not None


def test_a_segment_folder_without_its_metadata_is_damage_and_not_an_endless_loop(tmp_path: Path):
    store, _ = whole_store(tmp_path / "out")
    (store.path / "responses/s-00000002/zarr.json").unlink()
    with pytest.raises(DamagedError) as caught:
        storage.open(store.path)
    assert caught.value.code == "segment.damaged"


def test_reading_writes_nothing(tmp_path: Path):
    store, _ = whole_store(tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in store.path.rglob("*")}
    list(storage.open(store.path))
    assert {path: path.stat().st_mtime_ns for path in store.path.rglob("*")} == before
    assert json.loads((store.path / "run.json").read_text())["id"] == store.run.id
