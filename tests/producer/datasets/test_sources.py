"""Files to rows: every kind of file, and what is wrong with some of them."""

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from producer.datasets.sources import find_files, read_rows, source_digest
from storage.errors import UsageError
from tests.producer.small import write_lines

ROWS = [{"prompt": f"row {n}", "mixed": n if n % 2 else str(n)} for n in range(2500)]


def values(*files: Path, start: int = 0) -> list[object]:
    return [row.value for row in read_rows(files, start)]


def test_json_lines_of_mixed_types_come_one_by_one(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    assert values(path) == ROWS
    assert values(path, start=2400) == ROWS[2400:]


def test_gzip_and_an_array_give_the_same_rows(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    assert values(tmp_path / "rows.jsonl.gz") == ROWS
    assert values(tmp_path / "rows.json", start=10) == ROWS[10:]


def test_a_json_file_may_hold_lines(tmp_path: Path) -> None:
    assert values(write_lines(tmp_path / "rows.json", ROWS[:5])) == ROWS[:5]


def test_parquet_gives_rows_of_the_columns_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": f"row {n}", "other": n} for n in range(2500)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert values(tmp_path / "rows.parquet", start=2000) == rows[2000:]
    some = [row.value for row in read_rows([tmp_path / "rows.parquet"], 0, ("prompt", "not there"))]
    assert some == [{"prompt": row["prompt"]} for row in rows]


def test_rows_are_numbered_over_all_files_and_lines_within_each(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", ROWS[:3])
    second = write_lines(tmp_path / "b.jsonl", ROWS[3:5])
    rows = list(read_rows([first, second]))
    assert [row.number for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4].where == "b.jsonl line 2"
    assert [row.number for row in read_rows([first, second], 4)] == [4]


def test_a_broken_line_is_named_by_its_number_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "rows.jsonl", ['{"prompt": "one"}', '{"prompt": "tw', "", '{"prompt": "three"}']
    )
    rows = list(read_rows([path]))
    assert [row.value for row in rows] == [{"prompt": "one"}, None, {"prompt": "three"}]
    assert rows[1].where == "rows.jsonl line 2"
    assert rows[1].broken == "Unterminated string starting at"
    assert rows[2].number == 3  # blank lines count, so that numbers are those an editor shows


def test_bytes_that_are_no_utf8_break_their_line_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n{"prompt": "\xc3\xa9"}\r\n')
    broken, good = read_rows([path])
    assert broken.broken is not None
    assert good.value == {"prompt": "é"}


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\n')
    assert values(path) == [{"prompt": "one"}]


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet", "rows.json"])
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"[neither of these")
    with pytest.raises(UsageError, match=f"{name}` cannot be read as"):
        list(read_rows([path]))


def test_a_gzip_that_ends_early_is_named(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "whole.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes((tmp_path / "whole.gz").read_bytes()[:-4000])
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_rows([path]))


def test_globs_take_their_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c [1].jsonl"):
        write_lines(tmp_path / name, ROWS[:1])
    assert [file.name for file in find_files("file:*.jsonl", tmp_path)] == [
        "a.jsonl",
        "b.jsonl",
        "c [1].jsonl",
    ]
    (odd,) = find_files("file:c [1].jsonl", tmp_path)
    assert values(odd) == ROWS[:1]


def test_a_folder_may_be_called_like_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "run [1]"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [{"n": 1}])
    assert find_files("file:*.jsonl", folder) == (folder / "a.jsonl",)
    assert find_files(f"file:{tmp_path}/*/*.jsonl", folder) == (folder / "a.jsonl",)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.jsonl` is not there"):
        find_files("file:gone.jsonl", tmp_path)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match=r"empty.jsonl` is empty"):
        find_files("file:empty.jsonl", tmp_path)


def test_a_folder_or_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        find_files("file:.", tmp_path)
    (tmp_path / "rows.csv").write_text("prompt\n")
    with pytest.raises(UsageError, match="not a kind of file"):
        find_files("file:rows.csv", tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_nobody_may_read_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", ROWS[:1]).chmod(0)
    with pytest.raises(UsageError, match="cannot be read"):
        find_files("file:rows.jsonl", tmp_path)


def test_the_digest_is_of_the_bytes_and_not_of_the_names(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", ROWS[:10])
    other = write_lines(tmp_path / "other.jsonl", ROWS[:10])
    assert source_digest([one]) == source_digest([other])
    write_lines(other, ROWS[:11])
    assert source_digest([one]) != source_digest([other])
    assert source_digest([one, other]) != source_digest([other, one])
