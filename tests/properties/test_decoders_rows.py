"""Every form of row and every kind of file: a prompt, or a counted reason, or one of our errors."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hostile import as_text, deep, given_or_refused, spoiled, spoiled_bytes, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producer.datasets.forms import Dropped, Form, Given, Reason, Shape, Talk, find_shape, parse
from producer.datasets.occurrences import Occurrences
from producer.datasets.prompts import Limits, make_prompts
from producer.datasets.sources import Row, find_files, read_rows, source_digest
from producer.datasets.template import Template

calm = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TURN = {"role": "user", "content": "hello"}
SOUND = {
    Form.TEXT: ("prompt", {"prompt": "hello"}),
    Form.MESSAGES: (
        "messages",
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "be"}]}, TURN, TURN]},
    ),
    Form.CONVERSATIONS: ("conversations", {"conversations": [{"from": "human", "value": "hello"}]}),
    Form.TURNS: ("turns", {"turns": ["hello", "again"]}),
    Form.INPUT_IDS: ("input_ids", {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}),
}


@pytest.mark.parametrize("form", list(Form))
def test_a_sound_row_of_each_form_is_read(form: Form) -> None:
    column, row = SOUND[form]
    assert find_shape([row]) == Shape(form=form, column=column)
    assert isinstance(parse(row, Shape(form=form, column=column)), Talk | Given)


@calm
@given(form=st.sampled_from(list(Form)), data=st.data())
def test_a_row_gives_a_prompt_or_a_reason(template: Template, form: Form, data: st.DataObject) -> None:
    column, sound = SOUND[form]
    row: Any = data.draw(st.one_of(spoiled(sound), values))
    if isinstance(row, dict):
        found = find_shape([row])
        assert found is None or found.column in row
    limits = Limits(vocab_size=template.vocab_size, max_input_tokens=100)
    batches = list(
        make_prompts(
            [Row(0, "line 1", row)],
            dataset="d",
            shape=Shape(form=form, column=column),
            template=template,
            limits=limits,
            seen=Occurrences("d", ()),
        )
    )
    prompts = [prompt for batch in batches for prompt in batch.prompts]
    dropped = [reason for batch in batches for reason in batch.dropped]
    assert len(prompts) + len(dropped) == 1
    for prompt in prompts:
        assert 0 < len(prompt.tokens) < 100
        assert prompt.tokens.min() >= 0
        assert prompt.tokens.max() < template.vocab_size
        assert [span.start for span in prompt.spans] == [0, *(span.end for span in prompt.spans[:-1])]
        assert prompt.spans[-1].end == len(prompt.tokens)
    assert set(dropped) <= {reason.value for reason in Reason}


def test_a_role_or_a_turn_that_is_nested_deep_is_a_reason() -> None:
    nested: Any = []
    for _ in range(900):
        nested = [nested]
    shape = Shape(form=Form.MESSAGES, column="messages")
    for row in ({"messages": [{"role": nested, "content": "a"}]}, {"messages": nested}):
        assert isinstance(parse(row, shape), Dropped)


@calm
@given(
    lines=st.lists(st.one_of(st.just(as_text({"prompt": "a"})), st.binary(max_size=40)), max_size=6),
    zipped=st.booleans(),
)
def test_lines_of_any_bytes(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], zipped: bool
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    content = b"\n".join(lines)
    (folder / ("a.jsonl.gz" if zipped else "a.jsonl")).write_bytes(
        gzip.compress(content) if zipped else content
    )
    rows = given_or_refused(lambda: list(read_all("file:a.jsonl*", folder)))
    good = sum(line.removeprefix(b"\xef\xbb\xbf") == b'{"prompt": "a"}' for line in lines)
    if rows is not None and not any(b"\r" in line or b"\n" in line for line in lines):
        assert sum(row.value == {"prompt": "a"} for row in rows) == good


def read_all(source: str, folder: Path) -> list[Row]:
    files = find_files(source, folder)
    source_digest(files)
    return list(read_rows(files))


@calm
@given(content=st.one_of(spoiled_bytes(as_text([{"prompt": "a"}])), values.map(as_text), st.just(deep())))
def test_an_array_of_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("array")
    (folder / "a.json").write_bytes(content)
    given_or_refused(lambda: read_all("file:a.json", folder))


def parquet() -> bytes:
    written = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"prompt": ["a", "b"], "input_ids": [[1], [2, 3]]}), written)
    return written.getvalue()


@settings(calm, max_examples=40)
@given(content=spoiled_bytes(parquet()))
def test_a_table_of_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("table")
    (folder / "a.parquet").write_bytes(content)
    given_or_refused(lambda: read_all("file:a.parquet", folder))


@calm
@given(content=spoiled_bytes(gzip.compress(json.dumps({"prompt": "a"}).encode())))
def test_a_zipped_file_of_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("zipped")
    (folder / "a.jsonl.gz").write_bytes(content)
    given_or_refused(lambda: read_all("file:a.jsonl.gz", folder))
