"""Files of the store, the spool and the model: whatever is in one, a value or one of our errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import as_text, given_or_refused, odd_texts, spoiled, spoiled_bytes, texts, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producer.datasets.model_folder import ModelFolder
from storage.arrays import ArrayFile, sharded_layout, write_plain
from storage.codec import Codec
from storage.files import NAME, checked_name, read_json, write_json
from storage.run import CaptureSpec, Run, RunSpec, Sampling, StatesMode, read_run
from storage.sample import SpoolRef
from storage.segment import Segment, SegmentName
from storage.settings import DatasetSettings, RunSettings, read_settings, write_settings
from storage.spool import Spool

calm = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CAPTURE = CaptureSpec(name="eagle3", hs_indices=(2, 4, 5, 8), norm="post", hidden_size=8)
SPEC = RunSpec(
    model="org/model",
    tokenizer_digest="aa",
    template_digest="bb",
    vocab_size=100,
    sampling=Sampling(),
    short_max_tokens=10,
    long_max_tokens=20,
    states=StatesMode.REPLAY,
    capture=CAPTURE,
)
RUN = {"format": 1, "id": "0" * 32, "fingerprint": SPEC.fingerprint, "spec": SPEC.to_json()}
SETTINGS = RunSettings(
    server_urls=("http://a:1",),
    capture_urls=(),
    concurrency={"short": 150},
    max_input_tokens=1000,
    states=StatesMode.REPLAY,
    capture=CAPTURE,
    datasets={"B1": DatasetSettings(max_samples=7)},
)


@calm
@given(text=texts(RUN))
def test_run_json(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "run.json").write_bytes(text)
    run = given_or_refused(lambda: read_run(tmp_path))
    assert run is None or run.spec.fingerprint == json.loads(text)["fingerprint"]
    if run is not None and run.spec.capture is not None:
        assert NAME.fullmatch(run.spec.capture.name)


def test_a_run_comes_back_equal(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(as_text(RUN))
    assert read_run(tmp_path) == Run(id="0" * 32, spec=SPEC)


@calm
@given(text=texts(json.loads(as_text(SETTINGS.to_json()))))
def test_settings_json(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "settings.json").write_bytes(text)
    found = given_or_refused(lambda: read_settings(tmp_path))
    if found is not None:
        assert all(NAME.fullmatch(name) for name in found.datasets)
        assert found.capture is None or NAME.fullmatch(found.capture.name)
        # what was read can be kept again, and is the same then
        write_settings(tmp_path, found)
        assert read_settings(tmp_path) == found


@calm
@given(text=texts({"vocab_size": 8, "text_config": {"hidden_size": 8}, "chat_template": "x"}))
def test_a_model_s_config(tmp_path: Path, text: bytes) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(text)
    folder = ModelFolder(model="m", path=tmp_path)
    assert isinstance(given_or_refused(folder.config) or {}, dict)
    given_or_refused(folder.template_digest)


SEGMENT = {
    "zarr_format": 3,
    "node_type": "group",
    "attributes": {"samples": 2, "datasets": ["B1"], "replaces": ["s-00000001"], "next_row": 3},
}


@calm
@given(text=texts(SEGMENT))
def test_a_segment_s_attributes(tmp_path: Path, text: bytes) -> None:
    folder = tmp_path / "s-00000002"
    folder.mkdir(exist_ok=True)
    (folder / "zarr.json").write_bytes(text)
    found = given_or_refused(lambda: Segment(tmp_path, SegmentName(node=None, seq=2)))
    if found is not None:
        assert found.samples >= 0
        for name in found.replaces:
            assert (tmp_path / name).resolve().parent == tmp_path.resolve()


@given(text=st.one_of(odd_texts, st.from_regex(r"s-.*-?[0-9]{8,12}", fullmatch=True)))
def test_a_segment_s_name_stays_in_its_folder(text: str) -> None:
    name = SegmentName.parse(text)
    if name is not None:
        assert "/" not in text
        assert SegmentName.parse(str(name)) == name


LAYOUTS = [
    sharded_layout((10, 2, 3), np.dtype("<u2"), codec, chunk_bytes=24, shard_bytes=48) for codec in Codec
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.codec.value)
def test_an_array_s_metadata_comes_back_equal(layout: Any) -> None:
    assert type(layout).from_json(json.loads(json.dumps(layout.to_json()))) == layout


@calm
@given(data=st.data())
def test_an_array_s_metadata(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("array") / "a"
    write_plain(folder, np.arange(6, dtype=np.int32).reshape(3, 2))
    sound = json.loads((folder / "zarr.json").read_text())
    (folder / "zarr.json").write_bytes(data.draw(texts(sound)))

    def read() -> Any:
        array = ArrayFile(folder)
        # as much as any column of a segment of this size could hold
        return array.read(0, min(len(array), 1000))

    given_or_refused(read, FileNotFoundError)


@calm
@given(data=st.data())
def test_a_spool_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, "n", 1 << 20)
    states = np.arange(1, 25, dtype=np.uint16).reshape(4, 2, 3)
    ref = spool.write("file", states)
    sound = (folder / "file").read_bytes()
    changed = data.draw(spoiled_bytes(sound))
    (folder / "file").write_bytes(changed)

    def read() -> Any:
        return np.concatenate([block.copy() for block in spool.blocks(ref)])

    found = given_or_refused(read)
    assert found is None or np.array_equal(found, states)


HEADER = {"dtype": "bfloat16", "shape": [4, 2, 3], "crc32": 1}


@calm
@given(text=texts(HEADER))
def test_a_spool_file_s_header(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    folder = tmp_path_factory.mktemp("spool")
    text = text[: 512 - 16]
    header = b"EYASPOOL" + (1).to_bytes(4, "little") + len(text).to_bytes(4, "little") + text
    (folder / "file").write_bytes(header.ljust(512) + bytes(48))
    spool = Spool(folder, "n", 1 << 20)
    given_or_refused(lambda: spool.check_values(SpoolRef(node="n", name="file", shape=(4, 2, 3), crc32=1)))


@given(name=odd_texts)
def test_a_spool_never_reads_writes_or_deletes_outside(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    around = tmp_path_factory.mktemp("around")
    (around / "precious").write_text("x")
    spool = Spool(around / "spool", "n", 1 << 20)
    (around / "spool" / "link").symlink_to(around / "precious")
    for hostile in (name, "../precious", str(around / "precious"), "link"):
        ref = SpoolRef(node="n", name=hostile, shape=(1, 1, 1), crc32=0)
        given_or_refused(lambda ref=ref: spool.check_values(ref))
        if hostile != "link":
            given_or_refused(lambda hostile=hostile: spool.writer(hostile, (1, 1, 1)).abort())
        spool.delete(ref)
    assert (around / "precious").read_text() == "x"
    assert {path.name for path in around.iterdir()} == {"precious", "spool"}


@given(name=st.one_of(odd_texts, st.from_regex(NAME, fullmatch=True)))
def test_a_checked_name_is_one_folder_s(name: str) -> None:
    if given_or_refused(lambda: checked_name(name, "node")) is not None:
        assert Path("/somewhere", name).resolve().parent == Path("/somewhere")


@calm
@given(content=st.dictionaries(odd_texts, values, max_size=3))
def test_whatever_a_server_said_can_be_kept(tmp_path: Path, content: Any) -> None:
    write_json(tmp_path / "facts.json", content)
    assert isinstance(read_json(tmp_path / "facts.json"), dict)


@calm
@given(content=spoiled(json.loads(as_text(SPEC.to_json()))))
def test_a_spec_is_typed_or_refused(content: Any) -> None:
    found = given_or_refused(lambda: RunSpec.from_json(content), ValueError)
    if found is not None:
        assert isinstance(found.vocab_size, int)
        assert isinstance(found.model, str)
        assert RunSpec.from_json(json.loads(json.dumps(found.to_json()))) == found
