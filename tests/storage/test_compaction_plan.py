"""What is worth merging: sizes in, groups out, and what it costs in the long run."""

from hypothesis import given
from hypothesis import strategies as st

from storage.compaction_plan import MANY, SMALL, Candidate, past_many, worth_merging

MB = 1 << 20
TARGET = 256 * MB


def candidate(name: object, size: int, rows: int = 100, dropped: int = 0, alike: str = "") -> Candidate:
    return Candidate(name=str(name), size_bytes=size, rows=rows, dropped=dropped, alike=alike)


def test_small_ones_are_merged_up_to_the_target_and_big_ones_left():
    segments = [candidate(at, 60 * MB) for at in range(10)] + [candidate("big", 64 * MB)]
    assert worth_merging(segments, TARGET) == [
        ("0", "1", "2", "3"),
        ("4", "5", "6", "7"),
        ("8", "9"),
    ]


def test_only_what_is_alike_is_merged_and_nothing_alone():
    segments = [candidate(0, MB, alike="a"), candidate(1, MB, alike="b"), candidate(2, MB, alike="a")]
    assert worth_merging(segments, TARGET) == [("0", "2")]
    assert worth_merging([candidate(0, MB)], TARGET) == []


def test_a_big_one_is_written_again_only_when_an_eighth_of_it_goes():
    assert worth_merging([candidate(0, 2 * TARGET, rows=80, dropped=9)], TARGET) == []
    assert worth_merging([candidate(0, 2 * TARGET, rows=80, dropped=10)], TARGET) == [("0",)]
    assert worth_merging([candidate(0, MB, rows=80, dropped=1)], TARGET) == [("0",)]


@given(sizes=st.lists(st.integers(1, 3 * TARGET), max_size=60))
def test_what_comes_out_leaves_nothing_to_do(sizes: list[int]):
    segments = [candidate(at, size) for at, size in enumerate(sizes)]
    groups = worth_merging(segments, TARGET)
    size_of = {segment.name: segment.size_bytes for segment in segments}
    merged = [candidate("+".join(group), sum(size_of[name] for name in group)) for group in groups]
    assert all(segment.size_bytes <= TARGET for segment in merged)
    taken = {name for group in groups for name in group}
    rest = [segment for segment in segments if segment.name not in taken]
    assert worth_merging([*rest, *merged], TARGET) == []


def test_a_sink_leaves_sixty_four_small_ones_alone_and_merges_one_more():
    segments = [candidate(at, MB) for at in range(MANY)]
    assert past_many(segments, TARGET) == []
    assert [len(group) for group in past_many([*segments, candidate("x", MB)], TARGET)] == [MANY + 1]


@given(
    sizes=st.lists(st.sampled_from([40_000, 200_000, 2 * MB, 20 * MB, 70 * MB]), min_size=400, max_size=1500)
)
def test_a_sink_keeps_few_small_segments_and_writes_thrice_what_came_at_most(sizes: list[int]):
    segments: dict[str, Candidate] = {}
    written = 0
    for at, size in enumerate(sizes):
        segments[str(at)] = candidate(at, size)
        while groups := past_many(segments.values(), TARGET):
            for group in groups:
                total = sum(segments.pop(name).size_bytes for name in group)
                segments[f"{at}:{group[0]}"] = candidate(f"{at}:{group[0]}", total)
                written += total
        small = [segment for segment in segments.values() if segment.size_bytes < TARGET // SMALL]
        assert len(small) <= 2 * MANY
    assert written <= 3 * sum(sizes)
