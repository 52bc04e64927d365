"""`storage verify` and segments that were merged into others; and what it says of dead letters."""

import io
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

from compact_making import DAY_S, assert_all_there, compacted, many_segments, quiet, storage_command
from store_making import (
    CAPTURE,
    SPEC,
    add_all,
    make_failure,
    make_prompts,
    make_response,
    make_states,
    new_store,
)

from storage.progress import Progress
from storage.run import StatesMode
from storage.settings import DatasetSettings, RunSettings, write_settings
from storage.store import Store
from storage.verify import verify


def settle(store: Store, states: StatesMode = StatesMode.REPLAY) -> None:
    settings = RunSettings(
        server_urls=(),
        capture_urls=(),
        concurrency={},
        max_input_tokens=1000,
        states=states,
        capture=store.run.spec.capture,
        datasets={"B1": DatasetSettings()},
    )
    write_settings(store.path, settings)


def test_replaced_segments_are_not_counted_and_named_only_when_they_are_overdue(tmp_path: Path):
    store, _, _ = many_segments(tmp_path / "out", samples=8)
    settle(store)
    compacted(store.path)
    report = verify(store.path, quiet())
    assert report.ok
    assert report.segments == 4
    assert report.samples == {"prompts": 8, "responses": 8, "states": 8, "failures": 0}
    assert report.notes == ("8 segments were merged into others; they are deleted a day later",)
    merged = store.path / "states" / CAPTURE.name / "s-merged-00000001/zarr.json"
    at = time.time() - DAY_S - 7200
    os.utime(merged, (at, at))
    notes = verify(store.path, quiet()).notes
    assert [note for note in notes if "s-node1-00000002" in note]
    assert f"`storage compact {store.path}` deletes it" in notes[0]
    assert notes[-1].startswith("6 segments")


def test_what_is_merged_and_deleted_while_verify_reads_is_checked_where_it_went(tmp_path: Path):
    """The compaction runs when a part of each kind has been read."""
    store, spool, responses = many_segments(tmp_path / "out", samples=24)
    settle(store)

    class Meanwhile(Progress):
        kinds = ("responses", "states")

        def say(self, **values: object) -> None:
            if self.kinds and values.get(self.kinds[0]):
                type(self).kinds = self.kinds[1:]
                compacted(store.path, kept_s=0)
                late = make_response(store.prompt("B1", 0), seed=len(self.kinds) + 3)
                store.commit_states([make_states(late, spool)], spool)

    report = verify(store.path, Meanwhile("verifying", io.StringIO()), threads=1)
    assert Meanwhile.kinds == ()
    assert report.problems == ()
    assert report.samples["responses"] == 24
    assert report.complete
    assert_all_there(store.path, responses)


def test_a_segment_that_is_taken_away_is_missed_though_others_were_merged(tmp_path: Path):
    store, spool, _ = many_segments(tmp_path / "out", samples=8)
    compacted(store.path, kept_s=0)
    for seed in (5, 6, 7):
        late = make_response(store.prompt("B1", 0), seed=seed)
        store.commit_states([make_states(late, spool)], spool)
    shutil.rmtree(store.path / "states" / CAPTURE.name / "s-node1-00000004")
    problems = verify(store.path, quiet()).problems
    assert [(p.code, p.segment) for p in problems] == [
        ("segment.missing", f"states/{CAPTURE.name}/s-node1-00000004")
    ]


def test_dead_letters_are_said_in_the_last_line_and_change_no_exit_status(tmp_path: Path):
    spec = replace(SPEC, states=StatesMode.OFF, capture=None)
    store = new_store(tmp_path / "out", spec)
    prompts = make_prompts(4)
    add_all(store, prompts)
    settle(store, StatesMode.OFF)
    store.commit_failures([make_failure(prompt) for prompt in prompts])
    done = storage_command("verify", str(store.path))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == (
        "all ok, but nothing to train on: all 4 wanted are dead letters; `producer status --failed` says why"
    )
    store.commit_responses([make_response(prompt) for prompt in prompts[:3]])
    done = storage_command("verify", str(store.path))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == (
        "all ok; 1 of 4 wanted are dead letters: `producer status --failed` says why"
    )
