"""What is counted in a store for people to watch: its bytes as it grows, its dead letters by code."""

import shutil
from dataclasses import replace
from pathlib import Path

from storage.compaction import FolderCompaction
from storage.dead_letters import DeadLetters
from storage.index import Index
from storage.run import StatesMode
from storage.stored_bytes import StoredBytes
from tests.workers.sink.making import make_failure, make_prompts, make_response, make_store


def bytes_of_segments(path: Path) -> int:
    """All files below a segment's name, counted another way."""
    return sum(
        file.stat().st_size
        for kind in ("prompts", "responses", "states", "failures")
        for file in (path / kind).rglob("*")
        if file.is_file() and any(part.startswith("s-") for part in file.parts)
    )


def test_the_stores_bytes_follow_each_commit_and_each_deletion(tmp_path: Path) -> None:
    store = make_store(tmp_path / "out", {"B1": 20, "B2": 5}, states=StatesMode.OFF)
    size = StoredBytes(store.path)
    before = size.refresh()
    assert before == bytes_of_segments(store.path) > 0
    prompts = make_prompts("B1", 20)
    store.commit_responses([make_response(prompt) for prompt in prompts[:10]])
    store.commit_failures([make_failure(prompt) for prompt in prompts[10:]])
    (store.path / ".staging" / "half").mkdir()
    (store.path / ".staging" / "half" / "c.0").write_bytes(b"x" * 1000)
    grown = size.refresh()
    assert grown == bytes_of_segments(store.path) > before
    (segment,) = (store.path / "failures").glob("s-*")
    shutil.rmtree(segment)
    assert size.refresh() == bytes_of_segments(store.path) < grown


def test_a_store_without_anything_has_no_bytes(tmp_path: Path) -> None:
    assert StoredBytes(tmp_path / "nothing").refresh() == 0


def test_dead_letters_are_counted_by_their_last_code_while_they_stand(tmp_path: Path) -> None:
    store = make_store(tmp_path / "out", {"B1": 6, "B2": 3}, states=StatesMode.OFF)
    one, two = make_prompts("B1", 6), make_prompts("B2", 3)
    dead, index = DeadLetters(store), Index(store, None)

    def counted(name: str, first: int | None = None) -> dict[str, int]:
        index.refresh()
        return dead.by_code(index.dataset(name), first)

    assert counted("B1") == {}
    store.commit_failures([make_failure(prompt, "reply.short") for prompt in one[:3]])
    store.commit_failures([make_failure(two[0], "server.refused")])
    assert counted("B1") == {"reply.short": 3}
    assert counted("B2") == {"server.refused": 1}
    store.commit_failures([make_failure(one[4], "server.refused")])
    store.commit_responses([make_response(one[0])])  # after all
    assert counted("B1") == {"reply.short": 2, "server.refused": 1}
    assert counted("B1", first=4) == {"reply.short": 2}


def test_a_merge_of_older_dead_letters_does_not_bring_back_their_codes(tmp_path: Path) -> None:
    store = make_store(tmp_path / "out", {"B1": 3}, states=StatesMode.OFF)
    prompts = make_prompts("B1", 3)
    store.commit_failures([make_failure(prompts[0], "reply.short")])
    store.commit_failures([make_failure(prompts[1], "reply.short")])
    store.commit_failures([replace(make_failure(prompts[0], "server.refused"), retry=1)])
    dead, index = DeadLetters(store), Index(store, None)
    index.refresh()
    expected = {"reply.short": 1, "server.refused": 1}
    assert dead.by_code(index.dataset("B1")) == expected
    older = FolderCompaction(store.path, store.path / "failures", store.codec, node="node1")
    segments = older.look()
    assert older.merge([segments[name] for name in ("s-00000001", "s-00000002")], {}) is not None
    assert dead.by_code(index.dataset("B1")) == expected
    assert DeadLetters(store).by_code(index.dataset("B1")) == expected
