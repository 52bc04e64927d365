"""Rows in any order give back one tensor; checked against a plain array with a map."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.plugin.rows import SINGLE_ROWS, Part, Rows

HIDDEN = 3
PUTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.booleans()), max_size=30)


def numbered(rng, count):
    return rng.integers(0, 1 << 16, (count, 2 * HIDDEN), np.uint16), rng.integers(
        0, 1 << 16, (count, HIDDEN), np.uint16
    )


@given(PUTS, st.integers(1, 50), st.integers(1, 60), st.sampled_from([(0, 1, 2), (0, 2), (1,), (2,)]))
def test_what_comes_later_replaces_what_came_before(puts, total, block_rows, columns):
    rng = np.random.default_rng(len(puts))
    rows, covered = Rows(), np.zeros(64, bool)
    model = np.zeros((64, 3, HIDDEN), np.uint16)
    for start, count, single in puts:
        aux, final = numbered(rng, count)
        if single:
            for i in range(count):
                rows.put_row(start + i, aux[i], final[i])
        else:
            rows.put(Part(start=start, count=count, aux=aux, final=final))
        model[start : start + count, :2] = aux.reshape(count, 2, HIDDEN)
        model[start : start + count, 2] = final
        covered[start : start + count] = True
    assert rows.covered(total) == covered[:total].sum()
    missing = rows.first_missing(total)
    if missing is not None:
        assert not covered[missing]
        assert covered[:missing].all()
        return
    assert covered[:total].all()
    blocks = [block.copy() for block in rows.blocks(total, columns, block_rows)]
    assert all(len(block) <= block_rows for block in blocks)
    assert (np.concatenate(blocks) == model[:total, list(columns)]).all()


def test_single_rows_past_one_allocation_stay_in_order():
    rows, count = Rows(), 2 * SINGLE_ROWS + 5
    for t in range(count):
        rows.put_row(t, None, np.full(HIDDEN, t, np.uint16))
    (block,) = (block.copy() for block in rows.blocks(count, (0,), count))
    assert (block[:, 0, 0] == np.arange(count)).all()


def test_a_gap_is_never_written():
    rows = Rows()
    rows.put_row(0, None, np.zeros(HIDDEN, np.uint16))
    rows.put_row(2, None, np.zeros(HIDDEN, np.uint16))
    with pytest.raises(ValueError, match="no rows from 1 to 2"):
        list(rows.blocks(3, (0,), 8))


def test_rows_that_are_replaced_whole_give_their_memory_back():
    rows = Rows()
    for _ in range(5):
        rows.put(Part(start=0, count=10, aux=None, final=np.zeros((10, HIDDEN), np.uint16)))
    assert rows.size_bytes == 10 * HIDDEN * 2
