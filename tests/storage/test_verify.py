"""`storage verify`: a whole store is all ok, and each kind of damage is named where it is."""

import io
import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from store_making import (
    CAPTURE,
    SPEC,
    add_all,
    dataset_spec,
    make_failure,
    make_prompts,
    make_response,
    make_states,
    new_store,
    tensor_of,
    whole_store,
)

from storage.arrays import write_plain
from storage.progress import Progress
from storage.run import StatesMode
from storage.sample import Response
from storage.segment import SegmentName, Staging
from storage.settings import DatasetSettings, read_settings, write_settings
from storage.spool import Spool
from storage.states import stage_states
from storage.store import Store
from storage.tokens import as_tokens, prompt_id, response_digest
from storage.verify import Report, verify


def check(path: Path) -> Report:
    return verify(path, Progress("verifying", io.StringIO()))


def codes(path: Path) -> set[tuple[str, str, str]]:
    return {(problem.code, problem.segment, problem.id) for problem in check(path).problems}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "out"
    whole_store(path)
    return path


@pytest.fixture
def out(pristine: Path, tmp_path: Path) -> Path:
    """A copy of a whole store of 20 samples in two segments a kind, to be damaged."""
    shutil.copytree(pristine, tmp_path / "out")
    return tmp_path / "out"


def rewrite(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change a plain array as somebody would who also mends its checksum."""
    from storage.arrays import ArrayFile

    values = change(ArrayFile(folder).read().copy())
    shutil.rmtree(folder)
    write_plain(folder, values)


def flip(path: Path, at: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def set_datasets(out: Path, **caps: DatasetSettings) -> None:
    write_settings(out, replace(read_settings(out), datasets=caps))


RESPONSES = [make_response(prompt) for prompt in make_prompts(20)]


def test_a_whole_store_is_all_ok(out: Path):
    report = check(out)
    assert report.ok
    assert report.complete
    assert report.problems == report.notes == ()
    assert report.samples == {"prompts": 20, "responses": 20, "states": 20, "failures": 0}
    assert report.segments == 5
    (dataset,) = report.datasets
    assert (dataset.wanted, dataset.done, dataset.failed, dataset.missing, dataset.read) == (
        20,
        20,
        0,
        0,
        True,
    )
    size = sum(path.stat().st_size for path in out.rglob("s-*/**/*") if path.is_file())
    assert report.bytes == size


@pytest.mark.parametrize(
    "file",
    [
        "prompts/B1/s-00000001/tokens/c.0",
        "prompts/B1/s-00000001/source_row/c.0",
        "responses/s-00000002/tokens/c.0",
        "responses/s-00000002/text/c.0",
        "responses/s-00000001/spans/c.0.0",
        "responses/s-00000001/timings/c.0.0",
        "responses/s-00000001/counts/c.0.0",
        "responses/s-00000001/facts/c.0",
        "states/eagle3/s-node1-00000002/states/c.0.0.0",
        "states/eagle3/s-node1-00000002/id/c.0.0",
        "states/eagle3/s-node1-00000002/facts/c.0",
    ],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_is_named_by_its_segment(out: Path, file: str, damage: str):
    path = out / file
    match damage:
        case "flip":
            flip(path, path.stat().st_size // 2)
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "gone":
            path.unlink()
    segment = str(path.parents[1].relative_to(out))
    assert ("segment.damaged", segment, "") in codes(out)


@pytest.mark.parametrize(
    "segment", ["prompts/B1/s-00000001", "responses/s-00000001", "states/eagle3/s-node1-00000001"]
)
@pytest.mark.parametrize("text", ["{", "{}", '{"attributes": {"samples": 10}}', None])
def test_metadata_that_is_not_ours_is_named(out: Path, segment: str, text: str | None):
    path = out / segment / "zarr.json"
    path.write_text(text) if text is not None else path.unlink()
    found = {(problem.code.split(".")[0], problem.segment) for problem in check(out).problems}
    assert ("segment", segment) in found


def test_a_segment_that_was_taken_away_is_missed(out: Path):
    shutil.rmtree(out / "responses/s-00000001")
    report = check(out)
    assert ("segment.missing", "responses/s-00000001", "") in codes(out)
    assert not report.complete
    assert report.datasets[0].missing == 10


def test_a_changed_token_is_found_though_its_checksum_was_mended(out: Path):
    folder = out / "responses/s-00000001"
    rewrite(
        folder / "tokens", lambda tokens: np.where(np.arange(len(tokens)) == 0, (tokens + 1) % 1000, tokens)
    )
    key = RESPONSES[0].id.hex()
    assert codes(out) == {
        ("response.digest", str(folder.relative_to(out)), key),
        ("response.id", str(folder.relative_to(out)), key),
    }


def test_a_changed_prompt_is_found_by_its_id(out: Path):
    rewrite(
        out / "prompts/B1/s-00000001/tokens", lambda tokens: np.where(np.arange(len(tokens)) == 0, 7, tokens)
    )
    assert ("prompt.id", "prompts/B1/s-00000001", RESPONSES[0].id.hex()) in codes(out)


def test_ids_outside_the_vocabulary_are_found(out: Path):
    rewrite(out / "responses/s-00000002/tokens", lambda tokens: tokens + 990)
    found = codes(out)
    assert ("tokens.vocabulary", "responses/s-00000002", RESPONSES[10].id.hex()) in found


def test_a_changed_checksum_of_a_sample_is_found(out: Path):
    rewrite(out / "states/eagle3/s-node1-00000001/crc32", lambda sums: sums ^ np.uint32([1] + [0] * 9))
    assert codes(out) == {("states.crc32", "states/eagle3/s-node1-00000001", RESPONSES[0].id.hex())}


def test_offsets_and_lengths_that_do_not_fit_are_found(out: Path):
    rewrite(out / "states/eagle3/s-node1-00000001/offset", lambda offset: offset + 1)
    rewrite(out / "responses/s-00000001/counts", lambda counts: counts[:-1])
    found = codes(out)
    assert ("segment.offsets", "states/eagle3/s-node1-00000001", "") in found
    assert ("segment.lengths", "responses/s-00000001", "") in found


def test_spans_outside_their_tokens_are_found(out: Path):
    rewrite(out / "responses/s-00000001/spans", lambda spans: spans + np.int32([0, 500, 0, 0, 0]))
    assert ("spans.range", "responses/s-00000001", RESPONSES[0].id.hex()) in codes(out)


def stored_states(out: Path, response: Response, tensor: np.ndarray, **changes: object) -> None:
    """Commit states past the checks of a lane and a sink: good ones are staged, then made these."""
    spool = Spool(out.parent / "spool", "node2", 1 << 30)
    good = tensor_of(response)[: len(tensor)]
    states = replace(make_states(response, spool, good), **changes)
    with Staging(out, "test", Store.open(out).codec) as staging:
        stage_states(staging, [states], spool)
        zarr.open_array(staging.path / "states", mode="r+")[:] = tensor
        zarr.open_array(staging.path / "crc32", mode="r+")[:] = zlib.crc32(tensor.tobytes())
        assert staging.commit(out / "states" / CAPTURE.name, SegmentName(node="node2", seq=1))


@pytest.mark.parametrize(
    ("code", "rows", "value"),
    [
        ("states.finite", None, 0x7F80),
        ("states.zero", None, 0),
        ("states.rows", 3, None),
        ("states.rows", -1, None),
    ],
)
def test_states_no_forward_pass_gives_are_found(out: Path, code: str, rows: int | None, value: int | None):
    response = RESPONSES[4]
    tensor = tensor_of(response)
    if rows is not None:
        tensor = tensor[:rows]
    if value is not None:
        tensor[2, 1] = value
    stored_states(out, response, tensor)
    assert codes(out) == {(code, "states/eagle3/s-node2-00000001", response.id.hex())}


def test_states_of_other_layers_than_the_runs_are_found(out: Path):
    stored_states(out, RESPONSES[4], tensor_of(RESPONSES[4]), hs_indices=(1, 2, 3))
    assert codes(out) == {("states.capture", "states/eagle3/s-node2-00000001", "")}


def test_inline_states_may_lack_the_last_row_and_no_other(tmp_path: Path):
    spec = replace(SPEC, states=StatesMode.INLINE)
    store, spool = new_store(tmp_path / "out", spec), Spool(tmp_path / "spool", "node1", 1 << 30)
    prompts = make_prompts(2)
    add_all(store, prompts)
    responses = [make_response(prompt) for prompt in prompts]
    store.commit_responses(responses)
    for less, response in enumerate(responses, start=1):
        tensor = tensor_of(response, len(response.tokens) - less)
        store.commit_states([make_states(response, spool, tensor)], spool)
    assert codes(store.path) == {("states.rows", "states/eagle3/s-node1-00000002", responses[1].id.hex())}


def test_a_response_without_a_prompt_and_a_second_one_are_found(tmp_path: Path):
    store, _ = whole_store(tmp_path / "out")
    stranger, second = make_response(make_prompts(1, seed=9)[0]), make_response(make_prompts(1)[0], seed=9)
    for seq, response in enumerate((stranger, second), start=3):
        from storage.responses import stage_responses

        with Staging(store.path, "test", store.codec) as staging:
            stage_responses(staging, [response])
            assert staging.commit(store.path / "responses", SegmentName(node=None, seq=seq))
    found = codes(store.path)
    assert ("response.prompt", "responses/s-00000003", stranger.id.hex()) in found
    assert ("response.duplicate", "responses/s-00000004", second.id.hex()) in found


def test_prompts_that_repeat_and_rows_that_were_given_are_as_they_should_be(tmp_path: Path):
    store = new_store(tmp_path / "out", replace(SPEC, states=StatesMode.OFF, capture=None))
    tokens = as_tokens([1, 2, 3, 4, 5])
    prompts = [
        replace(
            make_prompts(1, "A1")[0],
            id=prompt_id("A1", tokens, occurrence=occurrence),
            tokens=tokens,
            spans=(),
            given_from=2,
        )
        for occurrence in range(3)
    ]
    add_all(store, prompts, "A1")
    given = [
        replace(
            make_response(prompt), tokens=tokens, spans=(), digest=response_digest(tokens), prompt_length=2
        )
        for prompt in prompts
    ]
    from storage.sample import Finish

    store.commit_responses([replace(response, finish=Finish.GIVEN) for response in given])
    assert codes(store.path) == set()
    add_again = replace(prompts[0], id=prompt_id("A1", tokens, occurrence=9))
    store.add_prompts("A1", [add_again], next_row=4, complete=True, dropped={})
    assert codes(store.path) == {("prompt.id", "prompts/A1/s-00000002", add_again.id.hex())}


def test_what_is_missing_is_counted_against_the_settings(tmp_path: Path):
    store, _ = whole_store(tmp_path / "out")
    store.begin_dataset(dataset_spec("B2"))
    more = make_prompts(6, "B2", seed=3)
    store.add_prompts("B2", more, next_row=6, complete=False, dropped={})
    store.commit_failures([make_failure(prompt) for prompt in more[:2]])

    set_datasets(store.path, B1=DatasetSettings(), B2=DatasetSettings(max_samples=2))
    assert check(store.path).ok, "dead letters are outcomes"
    set_datasets(store.path, B2=DatasetSettings(max_samples=5))
    report = check(store.path)
    assert (report.datasets[0].missing, report.datasets[0].failed, report.ok) == (3, 2, False)
    set_datasets(store.path, B2=DatasetSettings(max_samples=9), B3=DatasetSettings())
    report = check(store.path)
    assert [dataset.read for dataset in report.datasets] == [False, False]
    assert report.problems == ()


def test_a_store_without_settings_or_facts_is_noted(out: Path):
    (out / "settings.json").unlink()
    (out / "facts/f1.json").unlink()
    (out / ".staging/x.y").mkdir()
    report = check(out)
    assert report.ok
    assert len(report.notes) == 3
    shutil.rmtree(out / "states/eagle3/s-node1-00000002")
    report = check(out)
    assert (report.problems, report.datasets[0].missing, report.ok) == ((), 10, False)


def test_the_report_is_json(out: Path):
    flip(out / "states/eagle3/s-node1-00000002/states/c.0.0.0")
    content = json.loads(json.dumps(check(out).to_json()))
    assert content["ok"] is False
    assert content["problems"][0]["segment"] == "states/eagle3/s-node1-00000002"


def test_a_dead_letter_under_a_token_cap_leaves_nothing_to_read(tmp_path: Path):
    store, prompts = new_store(tmp_path / "out"), make_prompts(4)
    store.begin_dataset(dataset_spec())
    store.add_prompts("B1", prompts, next_row=4, complete=False, dropped={})
    spool = Spool(tmp_path / "spool", "node1", 1 << 30)
    given = [replace(make_response(p), tokens=p.tokens, digest=response_digest(p.tokens)) for p in prompts]
    store.commit_responses(given)
    store.commit_states([make_states(response, spool) for response in given[:3]], spool)
    store.commit_failures([make_failure(prompts[3], given[3].digest)])
    whole_store(tmp_path / "other" / "out", samples=2)
    cap = DatasetSettings(max_tokens=sum(len(prompt.tokens) for prompt in prompts))
    write_settings(store.path, replace(read_settings(tmp_path / "other" / "out"), datasets={"B1": cap}))
    (dataset,) = check(store.path).datasets
    assert (dataset.done, dataset.failed, dataset.missing, dataset.read) == (3, 1, 0, True)
