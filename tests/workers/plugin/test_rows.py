"""Parts and what they cover, against plain arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.plugin.rows import Coverage, Part

HIDDEN = 3
SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=30)


@given(SPANS, st.integers(1, 60))
def test_what_is_covered_is_what_a_plain_map_says(spans, total):
    coverage, model = Coverage(), np.zeros(64, bool)
    for start, count in spans:
        coverage.add(start, start + count)
        model[start : start + count] = True
    assert coverage.count(total) == model[:total].sum()
    missing = np.flatnonzero(~model[:total])
    assert coverage.first_missing(total) == (missing[0] if len(missing) else None)


@pytest.mark.parametrize("columns", [(0, 1, 2), (0, 2), (1,), (2,), (0, 1)])
def test_a_block_has_the_columns_that_are_wanted(columns):
    rng = np.random.default_rng(0)
    aux, final = (rng.integers(0, 1 << 16, (9, width), np.uint16) for width in (2 * HIDDEN, HIDDEN))
    block = np.zeros((4, len(columns), HIDDEN), np.uint16)
    Part(start=0, count=9, aux=aux, final=final).fill(block, 3, columns)
    whole = np.concatenate([aux.reshape(9, 2, HIDDEN), final[:, None]], axis=1)
    assert (block == whole[3:7, list(columns)]).all()
