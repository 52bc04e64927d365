"""Settings files: `eyas.toml`, manifests, the files of `producer up`: a value or one of our errors."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hostile import as_text, deep, given_or_refused, texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producer.datasets.manifest import KEYS, read_manifest
from producer.machine.processes import Identity
from producer.machine.up_state import Plan, Service, ServiceReport, StateFolder, UpState
from storage.errors import UsageError
from storage.files import NAME
from workers.config import KNOWN_KEYS, load_config, read_state, read_toml

calm = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


toml_values = st.one_of(
    st.sampled_from(
        ["1", "0", "-1", "true", "1e999", "nan", "9" * 30, "[1]", '["a"]', "{}", '"x"', '"\\u0000"', '""']
    ),
    st.text(max_size=10).map(json.dumps),
)
toml_lines = st.tuples(
    st.one_of(st.sampled_from(sorted(KNOWN_KEYS | KEYS)), st.text(max_size=8)), toml_values
)


@calm
@given(lines=st.lists(toml_lines, max_size=4), raw=st.binary(max_size=60), which=st.booleans())
def test_eyas_toml(tmp_path: Path, lines: list[tuple[str, str]], raw: bytes, which: bool) -> None:
    text = "\n".join(f"{key} = {value}" for key, value in lines).encode("utf-8", "replace")
    (tmp_path / "eyas.toml").write_bytes(text if which else raw)
    given_or_refused(lambda: read_toml(tmp_path / "eyas.toml"))
    config = given_or_refused(lambda: load_config({"EYAS_STATE_DIR": str(tmp_path)}, tmp_path))
    if config is not None:
        assert NAME.fullmatch(config.node)
        config.spool_dir.exists()


@calm
@given(
    tables=st.lists(st.lists(toml_lines, max_size=5), max_size=3),
    raw=st.binary(max_size=60),
    which=st.booleans(),
)
def test_a_manifest(tmp_path: Path, tables: list[list[tuple[str, str]]], raw: bytes, which: bool) -> None:
    text = "".join(
        "[[dataset]]\n" + "".join(f"{key} = {value}\n" for key, value in lines) for lines in tables
    ).encode("utf-8", "replace")
    (tmp_path / "m.toml").write_bytes(text if which else raw)
    found = given_or_refused(lambda: read_manifest(tmp_path / "m.toml"))
    if found is not None:
        assert all(NAME.fullmatch(dataset.name) for dataset in found.datasets)
        assert all(d.max_samples is None or d.max_samples < 2**63 for d in found.datasets)


@pytest.mark.parametrize("name", ["eyas.toml", "manifest"])
def test_toml_that_is_nested_too_deep(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"dataset = " + deep())
    with pytest.raises(UsageError, match="is not TOML"):
        (read_toml if name == "eyas.toml" else read_manifest)(path)


PLAN = Plan(
    number=1,
    redis_url="redis://127.0.0.1:1/0",
    engine_url=None,
    flower_url=None,
    flower_login=None,
    output_dir=None,
    spool_dir="/tmp/x",
    owns_spool=False,
    owner=Identity(pid=1, started="x"),
    services=(
        Service(
            name="redis", arguments=("a",), environment={"A": "b"}, check="redis", target="t", address="a"
        ),
    ),
)
STATE = UpState(
    token="t", pid=1, started="x", host="h", processes={"redis": ServiceReport(pid=2, started="y")}
)


@calm
@given(state=texts(asdict(STATE)), plan=texts(json.loads(as_text(asdict(PLAN)))))
def test_the_files_of_up(tmp_path: Path, state: bytes, plan: bytes) -> None:
    folder = StateFolder(tmp_path)
    (tmp_path / "up.json").write_bytes(state)
    (tmp_path / "plan.json").write_bytes(plan)
    (tmp_path / "up.json").chmod(0o600)
    found = folder.read_state()
    assert found is None or isinstance(found.pid, int)
    assert found is None or all(isinstance(one.pid, int) for one in found.recorded())
    plan_found = given_or_refused(folder.read_plan)
    assert plan_found is None or all(
        isinstance(word, str) for s in plan_found.services for word in s.arguments
    )
    assert all(isinstance(value, str) for value in read_state({"EYAS_STATE_DIR": str(tmp_path)}).values())


def test_the_files_of_up_come_back_equal(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write_plan(PLAN)
    folder.write_state(STATE)
    assert folder.read_plan() == PLAN
    assert folder.read_state() == STATE
