"""Compaction: fewer segments, every sample as it was, for those too who opened the store before."""

import io
import json
import os
import pickle
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
from compact_making import (
    DAY_S,
    assert_all_there,
    compacted,
    folder_of,
    many_segments,
    names,
    quiet,
    storage_command,
    store_again,
)
from store_making import CAPTURE, assert_same, make_failure, make_response, make_states, tensor_of

import storage
from storage.arrays import write_plain
from storage.catalog import Catalog
from storage.compact import compact
from storage.compaction import only_one
from storage.errors import UnavailableError
from storage.index import Index
from storage.progress import Progress
from storage.sample import Check
from storage.segment import Segment, SegmentName, list_segments
from storage.spool import Spool
from storage.store import Store
from storage.verify import verify

STATES = f"states/{CAPTURE.name}"


def test_a_compaction_leaves_one_segment_of_each_kind_and_every_sample_as_it_was(tmp_path: Path):
    store, _, responses = many_segments(tmp_path / "out")
    report = compacted(store.path)
    for name, before in [("responses", 6), (STATES, 6), ("failures", 12)]:
        folder = folder_of(report, name)
        assert (folder.segments_before, folder.segments_after, folder.merged) == (before, 1, before)
        assert folder.bytes_after < folder.bytes_before
    assert folder_of(report, "failures").made_good == 24
    assert list(Store.open(store.path).failures()) == []
    assert_all_there(store.path, responses)
    for response in responses:
        assert_same(Store.open(store.path).response(response.id), response)
    found = verify(store.path, quiet())
    assert found.problems == ()
    assert found.samples == {"prompts": 24, "responses": 24, "states": 24, "failures": 0}
    again = compacted(store.path)
    assert [folder.merged for folder in again.folders] == [0, 0, 0]
    assert again.waiting_segments == 24


def test_a_merged_segment_is_plain_zarr_for_others(tmp_path: Path):
    store, _, responses = many_segments(tmp_path / "out")
    compacted(store.path)
    group = zarr.open(store.path, mode="r")[f"{STATES}/s-merged-00000001"]
    expected = np.concatenate([tensor_of(response) for response in responses])
    assert np.array_equal(group["states"][:], expected)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(group.store_path).split("://")[1]}}
    spec["kvstore"]["path"] += "/states"
    assert np.array_equal(tensorstore.open(spec, open=True).result().read().result(), expected)
    assert group.attrs["hs_indices"] == list(CAPTURE.hs_indices)


def test_states_stored_on_two_nodes_are_kept_once_and_failures_that_still_count_all(tmp_path: Path):
    store, _spool, responses = many_segments(tmp_path / "out")
    other = Spool(tmp_path / "spool2", "node2", 1 << 40)
    store_again(store, [make_states(response, other) for response in responses[:5]], other)
    late = make_response(store.prompt("B1", 0), seed=9)
    dead = make_failure(store.prompt("B1", 0), late.digest)
    store.commit_failures([dead])
    report = compacted(store.path)
    assert folder_of(report, STATES).repeated_states == 5
    assert verify(store.path, quiet()).samples["states"] == len(responses)
    assert [failure.digest for failure in Store.open(store.path).failures()] == [late.digest]
    assert_all_there(store.path, responses)


def test_the_checks_facts_and_names_of_all_segments_are_in_the_merged_one(tmp_path: Path):
    store, spool, _ = many_segments(tmp_path / "out", samples=8, failing=0)
    prompts = list(store.prompts("B1"))
    for at, facts in enumerate(["a", "b", "a"]):
        response = make_response(prompts[at], seed=5)
        states = make_states(response, spool, facts_id=facts)
        checked = replace(states, check=Check(server=f"http://{at}", rows=at))
        store.commit_states([checked], spool)
    compacted(store.path)
    (name,) = (n for n in list_segments(store.path / STATES) if n.node == "merged")
    segment = Segment(store.path / STATES, name)
    assert [one["server"] for one in segment.attributes["checks"]] == ["http://0", "http://1", "http://2"]
    facts = [segment.attributes["facts"][place] for place in segment.column("facts")]
    assert facts == ["f1"] * 8 + ["a", "b", "a"]


def test_segments_of_other_layers_are_not_merged_with_each_other(tmp_path: Path):
    store, spool, responses = many_segments(tmp_path / "out", samples=8)
    for response in [make_response(store.prompt("B1", at), seed=3) for at in range(2)]:
        store.commit_states([replace(make_states(response, spool), norm="none")], spool)
    folder = folder_of(compacted(store.path), STATES)
    assert folder.segments_after == 2
    assert_all_there(store.path, responses)


def test_an_array_that_this_version_does_not_know_keeps_its_segment_as_it_is(tmp_path: Path):
    store, _, _ = many_segments(tmp_path / "out")
    newer = store.path / "responses/s-00000002"
    write_plain(newer / "novelty", np.arange(4))
    compacted(store.path, kept_s=0)
    assert names(store.path / "responses") == ["s-00000002", "s-00000007"]
    assert np.array_equal(Segment(newer.parent, SegmentName(node=None, seq=2)).column("novelty"), range(4))


def test_numbers_of_a_node_whose_segments_are_all_gone_are_not_given_again(tmp_path: Path):
    store, spool, responses = many_segments(tmp_path / "out", samples=9, each=4)
    compacted(store.path, kept_s=0)
    assert names(store.path / STATES) == ["s-merged-00000001"]
    again = Store.open(store.path)
    more = make_response(store.prompt("B1", 0), seed=4)
    again.commit_states([make_states(more, spool)], spool)
    compacted(store.path, kept_s=0)
    assert names(store.path / STATES) == ["s-merged-00000002"]
    last = make_response(store.prompt("B1", 0), seed=5)
    Store.open(store.path).commit_states([make_states(last, spool)], spool)
    assert names(store.path / STATES) == ["s-merged-00000002", "s-node1-00000005"]
    assert_all_there(store.path, responses)
    assert verify(store.path, quiet()).problems == ()


def test_readers_that_opened_before_go_on_past_the_deletion(tmp_path: Path):
    store, _, responses = many_segments(tmp_path / "out")
    opened, pickled = storage.open(store.path), pickle.dumps(storage.open(store.path))
    index = Index(store, CAPTURE.name)
    index.refresh()
    iterating = iter(opened)
    first = next(iterating)
    compacted(store.path)
    second = next(iterating)
    compacted(store.path, now=time.time() + DAY_S + 60)
    assert names(store.path / STATES) == ["s-merged-00000001"]
    rest = list(iterating)
    for sample, response in zip([first, second, *rest], responses, strict=True):
        assert np.array_equal(sample.states, tensor_of(response))
    fresh = pickle.loads(pickled)
    assert fresh.lengths.tolist() == [len(response.tokens) for response in responses]
    assert np.array_equal(fresh.sample(5).states, tensor_of(responses[5]))
    for response in responses:
        assert_same(store.response(response.id), response)
    index.refresh()
    assert index.dataset("B1").outcome.tolist() == [2] * len(responses)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_loader_goes_on_when_all_it_had_open_is_merged_and_deleted(tmp_path: Path):
    store, _, responses = many_segments(tmp_path / "out")
    samples = storage.open(store.path)
    samples.sample(0)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a hang ends as a failure
        samples.sample(1)
        os.write(ready[1], b".")
        os.read(go[0], 1)
        same = all(
            np.array_equal(sample.states, tensor_of(r)) for sample, r in zip(samples, responses, strict=True)
        )
        os._exit(0 if same else 1)
    os.read(ready[0], 1)
    compacted(store.path, kept_s=0)
    os.write(go[1], b".")
    assert os.waitpid(child, 0)[1] == 0


def test_dead_letters_are_listed_once_while_they_are_merged_and_deleted(tmp_path: Path):
    store, _, _ = many_segments(tmp_path / "out", samples=8, each=2, failing=0)
    prompts = list(store.prompts("B1"))
    for prompt in prompts:
        store.commit_failures([make_failure(prompt, bytes([7]) * 16)])
    listing = Store.open(store.path).failures()
    first = next(listing)
    compacted(store.path, kept_s=0)
    assert {first.id, *(failure.id for failure in listing)} == {prompt.id for prompt in prompts}


def test_what_was_replaced_goes_a_day_later_and_not_before(tmp_path: Path):
    store, _, responses = many_segments(tmp_path / "out")
    compacted(store.path)
    before = names(store.path / STATES)
    assert store.delete_replaced(now=time.time() + DAY_S - 60).segments == 0
    assert names(store.path / STATES) == before
    gone = store.delete_replaced(now=time.time() + DAY_S + 60)
    assert gone.segments == 24
    assert gone.size_bytes > 0
    assert names(store.path / STATES) == ["s-merged-00000001"]
    assert list((store.path / ".staging").iterdir()) == []
    assert_all_there(store.path, responses)


def test_what_is_merged_again_hides_what_the_first_had_hidden(tmp_path: Path):
    store, spool, responses = many_segments(tmp_path / "out", samples=8)
    compacted(store.path)
    store.commit_states([make_states(make_response(store.prompt("B1", 0), seed=4), spool)], spool)
    compacted(store.path)
    first = store.path / STATES / "s-merged-00000001"
    first.rename(tmp_path / "gone")  # deleted, and those it had replaced are still there
    assert "s-node1-00000001" in names(store.path / STATES)
    catalog = Catalog(store.path / STATES)
    catalog.refresh()
    assert [str(segment.name) for segment in catalog.visible()] == ["s-merged-00000002"]
    assert_all_there(store.path, responses)
    assert verify(store.path, quiet()).problems == ()


def test_a_damaged_segment_stays_and_no_sound_copy_is_dropped_for_it(tmp_path: Path):
    store, _spool, responses = many_segments(tmp_path / "out", samples=20, each=5)
    other = Spool(tmp_path / "spool2", "node2", 1 << 40)
    store_again(store, [make_states(response, other) for response in responses[:3]], other)
    damaged = store.path / STATES / "s-node1-00000001/states/c.0.0.0"
    data = bytearray(damaged.read_bytes())
    data[40] ^= 1
    damaged.write_bytes(data)
    (store.path / "responses/s-00000002/digest/c.0.0").write_bytes(b"nothing")
    done = storage_command("compact", str(store.path), "--json")
    assert done.returncode == 1
    left = [why for folder in json.loads(done.stdout)["folders"] for why in folder["left"]]
    assert len(left) == 2
    assert "s-00000002" in left[0]
    assert "s-node1-00000001" in left[1]
    assert names(store.path / STATES)[0] == "s-merged-00000001"
    merged = Segment(store.path / STATES, SegmentName(node="merged", seq=1))
    assert merged.samples == 15 + 3
    assert {problem.segment for problem in verify(store.path, quiet()).problems} >= {
        f"{STATES}/s-node1-00000001",
        "responses/s-00000002",
    }


def test_one_compaction_at_a_time_over_all_processes(tmp_path: Path):
    store, _, responses = many_segments(tmp_path / "out", samples=8)
    with only_one(store.path / "responses") as alone:
        assert alone
        done = storage_command("compact", str(store.path))
    assert done.returncode == 3
    assert "is being compacted by another process" in done.stderr
    assert f"`{store.path / 'responses'}`" in done.stderr
    assert "\nhint: " in done.stderr
    assert len(names(store.path / "responses")) == 2
    assert storage_command("compact", str(store.path)).returncode == 0
    assert_all_there(store.path, responses)


def test_a_sinks_own_merge_is_waited_for(tmp_path: Path):
    store, _, responses = many_segments(tmp_path / "out", samples=8)
    held = only_one(store.path / "responses")
    held.__enter__()

    class Freed(Progress):
        def say(self, **values: object) -> None:
            if values.get("waiting"):
                held.__exit__(None, None, None)

    report = compact(store.path, Freed("compacting", io.StringIO()))
    assert folder_of(report, "responses").segments_after == 1
    assert_all_there(store.path, responses)


def test_without_locks_two_compactions_at_once_lose_and_double_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each is in the middle of its merge when the other begins; the rename lets one of them have it."""
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    store, _, responses = many_segments(tmp_path / "out")
    barrier = threading.Barrier(2, timeout=30)

    class Together(Progress):
        def say(self, **values: object) -> None:
            if values and not barrier.broken and not hasattr(self, "met"):
                self.met = barrier.wait()

    reports, errors = [], []

    def work() -> None:
        try:
            reports.append(compact(store.path, Together("compacting", io.StringIO())))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(folder_of(report, "responses").merged for report in reports) == 6
    assert sum(folder_of(report, STATES).merged for report in reports) == 6
    assert verify(store.path, quiet()).samples == {
        "prompts": 24,
        "responses": 24,
        "states": 24,
        "failures": 0,
    }
    assert_all_there(store.path, responses)


def test_a_listing_that_leaves_one_out_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder that grows while it is read may show the last and not the one before it."""
    store, _, _responses = many_segments(tmp_path / "out", samples=8, each=2)
    real, calls = os.listdir, []

    def listdir(folder: str) -> list[str]:
        calls.append(folder)
        found = real(folder)
        return [name for name in found if name != "s-00000003"] if len(calls) == 1 else found

    monkeypatch.setattr(os, "listdir", listdir)
    catalog = Catalog(store.path / "responses")
    assert len(catalog.refresh()) == 4
    assert len(calls) == 2


def test_the_command_says_what_it_did_and_what_is_kept(tmp_path: Path):
    store, _, _ = many_segments(tmp_path / "out")
    done = storage_command("compact", "--output-dir", str(store.path))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["responses", "6", "→", "1"]
    assert "24 failures made good dropped" in lines[2]
    assert "24 replaced segments" in lines[3]
    assert done.stderr.splitlines()[0] == "compacting"
    info = json.loads(storage_command("info", str(store.path), "--json").stdout)
    assert info["segments"] == {"prompts": 1, "responses": 1, "states": 1, "failures": 1}
    assert info["replaced_segments"] == 24
    assert sum(info["bytes"].values()) + info["replaced_bytes"] == sum(
        path.stat().st_size
        for kind in info["bytes"]
        for path in (store.path / kind).rglob("*")
        if path.is_file()
    )
    assert storage_command("compact", str(store.path), "--keep-hours", "0").returncode == 2
    for merged in store.path.glob("**/zarr.json"):
        at = time.time() - 1000
        os.utime(merged, (at, at))
    last = storage_command("compact", str(store.path), "--keep-hours", "0.25").stdout
    assert "deleted 24 replaced segments" in last
    assert "nothing to merge" in last
    assert storage_command("verify", str(store.path)).returncode == 0
    assert "--keep-hours" in storage_command("compact", "--help").stdout


def test_no_run_or_another_runs_folder_is_not_compacted(tmp_path: Path):
    with pytest.raises(UnavailableError) as caught:
        compacted(tmp_path)
    assert caught.value.code == "run.missing"


def test_a_dead_letter_that_was_tried_again_keeps_its_number_beside_those_of_older_segments(tmp_path: Path):
    store, _, _ = many_segments(tmp_path / "out", samples=4, failing=0)
    prompts = list(store.prompts("B1"))
    store.commit_failures([make_failure(prompts[0], bytes([7]) * 16)])
    shutil.rmtree(store.path / "failures/s-00000001/retry")  # as it was before there were retries
    for number in (3, 5):
        store.commit_failures([replace(make_failure(prompts[1], bytes([8]) * 16), retry=number)])
    before = list(Store.open(store.path).failures())
    compacted(store.path, kept_s=0)
    assert names(store.path / "failures") == ["s-00000004"]
    after = list(Store.open(store.path).failures())
    assert [failure.retry for failure in after] == [0, 3, 5]
    assert after == before
