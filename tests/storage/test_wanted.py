"""What is wanted and what is left, by caps and states mode."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.index import DatasetIndex, Outcome, wanted
from storage.run import StatesMode
from storage.settings import DatasetSettings
from storage.wanted import read_enough

N, R, S, D = Outcome


def dataset(outcomes: list[Outcome], tokens: int = 100) -> DatasetIndex:
    index = DatasetIndex("B1")
    count = len(outcomes)
    index.extend(np.zeros((count, 16), np.uint8), np.full(count, 10, np.int32))
    index.outcome[:] = outcomes
    index.sample_tokens[:] = [tokens if outcome in (R, S) else 0 for outcome in outcomes]
    return index


@pytest.mark.parametrize(
    ("outcomes", "cap", "mode", "expected"),
    [
        ([N, R, S, D], {}, "replay", (4, 1, 1, [0, 1], False)),
        ([N, R, S, D], {}, "off", (4, 2, 1, [0], False)),
        ([N, R, S, D], {}, "inline", (4, 1, 1, [0, 1], False)),
        ([S, D, N, S], {"max_samples": 2}, "replay", (2, 1, 1, [], True)),
        ([S, D, N, S], {"max_samples": 3}, "replay", (3, 1, 1, [2], False)),
        ([S, R, N, N], {"max_samples": 2}, "replay", (2, 1, 0, [1], True)),
        ([S, S], {"max_samples": 5}, "replay", (2, 2, 0, [], False)),
        ([S, R, N, N], {"max_tokens": 200}, "replay", (2, 1, 0, [1], True)),
        ([S, R, N, N], {"max_tokens": 201}, "replay", (4, 1, 0, [1, 2, 3], False)),
        ([R, R, R, S], {"max_tokens": 150}, "replay", (3, 1, 0, [0, 1], True)),
        ([D, S, S, N], {"max_tokens": 200}, "replay", (3, 2, 1, [], True)),
        ([], {}, "replay", (0, 0, 0, [], False)),
    ],
)
def test_counts(outcomes, cap, mode, expected):
    found = wanted(dataset(outcomes), DatasetSettings(**cap), StatesMode(mode))
    assert (found.total, found.done, found.failed, found.missing.tolist(), found.closed) == expected
    assert found.finished == (not expected[3])


@given(
    outcomes=st.lists(st.sampled_from(list(Outcome)), max_size=30),
    max_samples=st.none() | st.integers(1, 30),
    max_tokens=st.none() | st.integers(1, 3000),
    mode=st.sampled_from(list(StatesMode)),
)
def test_every_wanted_prompt_is_done_failed_or_missing_and_no_cap_is_passed(
    outcomes, max_samples, max_tokens, mode
):
    cap = DatasetSettings(max_samples=max_samples, max_tokens=max_tokens)
    found = wanted(dataset(outcomes), cap, mode)
    assert found.total == found.done + found.failed + len(found.missing)
    assert max_samples is None or found.total <= max_samples
    if max_tokens is not None and found.closed and N in [outcomes[at] for at in found.missing]:
        pytest.fail("a closed dataset asks for responses")
    if max_tokens is not None and not found.closed:
        assert found.tokens < max_tokens


@pytest.mark.parametrize(
    ("outcomes", "cap", "complete", "expected"),
    [
        ([S, S], {}, True, True),
        ([S, S], {}, False, False),
        ([S, S], {"max_samples": 2}, False, True),
        ([S, S], {"max_samples": 3}, False, False),
        # Prompts of 10 tokens each: nobody reads on once they alone use the cap up.
        ([D, N], {"max_tokens": 20}, False, True),
        ([D, N], {"max_tokens": 21}, False, False),
        ([S, N], {"max_tokens": 100}, False, True),
    ],
)
def test_no_more_is_read_at_the_end_of_the_source_or_at_a_cap(outcomes, cap, complete, expected):
    index, settings = dataset(outcomes), DatasetSettings(**cap)
    plan = wanted(index, settings, StatesMode.REPLAY)
    assert read_enough(index, settings, plan, complete=complete) is expected
