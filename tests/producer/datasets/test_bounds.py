"""A hostile model folder or source: no code runs, no time or memory without end, an error that says why."""

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from producer.datasets.bounds import MOST_CHARACTERS
from producer.datasets.line_bounds import LINES, MOST_ARRAY_BYTES, MOST_LINE_BYTES, check_size
from producer.datasets.model_folder import MOST_BYTES, find_model
from producer.datasets.sources import find_files, read_rows, source_digest
from producer.datasets.template import Template, TemplateRefusedError
from storage.errors import UnsuitableError, UsageError
from tests.producer.small import Cli, write_model

HELLO = [{"role": "user", "content": "hello"}]


def template_of(folder: Path, text: str) -> Template:
    return Template(find_model(str(write_model(folder / "model", vocab_size=320, template=text))))


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch owned') }}",
        "{{ lipsum.__globals__['os'].system('touch owned') }}",
        "{{ self._TemplateReference__context }}",
        "{% for m in messages %}{{ m.update({'content': 'x'}) }}{% endfor %}",
        "{% set _ = messages.append(1) %}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    ],
)
def test_a_template_reaches_nothing_of_python(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    messages: list[dict[str, Any]] = [dict(HELLO[0])]
    template = template_of(tmp_path, text)
    try:
        said = template.render(messages)
    except TemplateRefusedError:
        said = ""
    assert "<class" not in said
    assert "function" not in said
    assert messages == HELLO
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "it raises numbers to a power"),
        ("{{ 9 ** 9 ** 9 }}", "it raises numbers to a power"),
        ("{% generation %}{{ 9 ** 9 }}{% endgeneration %}", "it raises numbers to a power"),
        ("{" * 3 + "%" * 3, "line 1"),
        ("{{ " + "(" * 2000 + ")" * 2000 + " }}", "it is nested too deep"),
        ("x" * (1 << 20) + "x", "it is `1048577` characters long"),
    ],
)
def test_a_template_that_could_never_end_is_not_begun(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UnsuitableError) as refused:
        template_of(tmp_path, text)
    assert refused.value.code == "template.unsafe"
    assert why in refused.value.message


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ 'x' * 100000000000 }}",
        "{{ ('x' * 100000000) ~ 'x' }}",
        "{% for i in range(90000) %}{{ 'x' * 10000 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ '%0900000000d' % 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[5].content }}",
    ],
)
def test_a_template_without_measure_is_refused(tmp_path: Path, text: str) -> None:
    template = template_of(tmp_path, text)
    with pytest.raises(TemplateRefusedError):
        template.render(HELLO)
    # and the process goes on
    assert len("x" * MOST_CHARACTERS) == MOST_CHARACTERS


def test_an_endless_template_ends_the_command_after_three_conversations(tmp_path: Path) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = Template(
        find_model(str(write_model(tmp_path / "model", vocab_size=320, template=loop))), render_s=0.2
    )
    for _ in range(2):
        with pytest.raises(TemplateRefusedError, match=r"longer than 0\.2 s"):
            template.render(HELLO)
    with pytest.raises(UnsuitableError) as refused:
        template.render(HELLO)
    assert refused.value.code == "template.endless"


def how_loading_ends(folder: Path) -> UnsuitableError | None:
    try:
        Template(find_model(str(folder)))
    except UnsuitableError as error:
        return error
    return None


def test_a_tokenizer_s_own_code_is_not_run_unless_asked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", vocab_size=320)
    (folder / "tokenization_own.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    # with or without it the library may have a class that fits
    said = how_loading_ends(folder)
    assert said is None or said.hint == "read that code, then add `--trust-remote-code`"
    assert not (tmp_path / "owned").exists()


class Owning:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "vocab.json", "tokenizer.model", "special_tokens_map.json"]
)
def test_a_pickle_in_a_tokenizer_s_place_is_not_loaded(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "model", vocab_size=320)
    (folder / name).write_bytes(pickle.dumps(Owning(tmp_path / "owned")))
    said = how_loading_ends(folder)
    assert said is None or said.code == "tokenizer.unusable"
    assert not (tmp_path / "owned").exists()


def test_a_tokenizer_of_a_gigabyte_is_refused_unread(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", vocab_size=320)
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(UnsuitableError) as refused:
        find_model(str(folder))
    assert refused.value.message == (
        f"`{folder}/tokenizer.json` has `{1 << 30}` bytes, no tokenizer more than `{MOST_BYTES}`"
    )


def test_a_tokenizer_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", vocab_size=320)
    (folder / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(UnsuitableError) as refused:
        Template(find_model(str(folder)))
    assert refused.value.code == "tokenizer.unusable"


def test_the_digest_knows_every_module_of_a_tokenizer_s_own_code(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", vocab_size=320)
    before = find_model(str(folder)).tokenizer_digest()
    (folder / "modeling_own.py").write_text("x = 1\n")
    assert find_model(str(folder)).tokenizer_digest() == before
    (folder / "own.py").write_text("from .helper import twice\n")
    (folder / "helper.py").write_text("from .more import x\ntwice = 2\n")
    (folder / "more.py").write_text("x = 1\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["own.Own", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    digests = [find_model(str(folder)).tokenizer_digest()]
    for name in ("helper.py", "more.py", "own.py"):
        (folder / name).write_text((folder / name).read_text() + "# changed\n")
        digests.append(find_model(str(folder)).tokenizer_digest())
    assert len(set(digests)) == 4
    (folder / "modeling_own.py").write_text("x = 2\n")
    assert find_model(str(folder)).tokenizer_digest() == digests[-1]


@pytest.mark.parametrize("zipped", [False, True])
def test_a_line_without_end_is_named_and_never_in_memory(tmp_path: Path, zipped: bool) -> None:
    good = b'{"prompt": "a"}\n'
    file = tmp_path / ("a.jsonl.gz" if zipped else "a.jsonl")
    with gzip.open(file, "wb", 1) if zipped else file.open("wb") as written:
        written.write(good * 2)
        for _ in range(70):
            written.write(b"x" * (1 << 20))
    assert not zipped or file.stat().st_size < 1 << 20
    with pytest.raises(UsageError) as refused:
        source_digest(find_files(f"file:{file.name}", tmp_path))
    assert refused.value.code == "source.line"
    assert f"`{file}` line 3 is longer than `{MOST_LINE_BYTES}` bytes" == refused.value.message


def test_long_files_of_short_lines_pass(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"".join(b'"%s"\n' % (b"x" * n) for n in range(90)))
    check_size(file, LINES, most_bytes=92, block_bytes=64)
    with pytest.raises(UsageError, match="line 90 is longer"):
        check_size(file, LINES, most_bytes=90, block_bytes=64)


def test_an_array_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.write(b"[")
        file.truncate(MOST_ARRAY_BYTES + 2)
    with pytest.raises(UsageError) as refused:
        source_digest(find_files("file:a.json", tmp_path))
    assert refused.value.code == "source.array"
    assert "jq -c '.[]' a.json > a.jsonl" in (refused.value.hint or "")


def test_a_row_of_many_megabytes_is_not_tokenized(tmp_path: Path, template: Template, cli: Cli) -> None:
    from producer.datasets.forms import Form, Shape
    from producer.datasets.occurrences import Occurrences
    from producer.datasets.prompts import Limits, make_prompts

    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a" * 5_000_000}) + "\n")
    (batch,) = make_prompts(
        read_rows(find_files("file:a.jsonl", tmp_path)),
        dataset="d",
        shape=Shape(form=Form.TEXT, column="prompt"),
        template=template,
        limits=Limits(vocab_size=template.vocab_size, max_input_tokens=100),
        seen=Occurrences("d", ()),
    )
    assert batch.dropped == {"tokens.too_long": 1}
    assert batch.skipped[0].detail.startswith("over ")
