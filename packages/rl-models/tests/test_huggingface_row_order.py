"""Where rows of the cache move when others leave, and which attend together."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rl_models.generation.huggingface.row_order import (
    Segment,
    group_ends,
    plan_moves,
    plan_segments,
)

COUNT = 32


def after_moves(alive, rows, ends):
    """The rows that stay, moved one after the other in place; and how many moved."""
    rows, num_moved = rows.copy(), 0
    for holes, movers in plan_moves(alive, rows, ends):
        assert (movers > holes.max()).all()
        rows[holes] = rows[movers]
        num_moved += len(holes)
    return rows[: alive.sum()], num_moved


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_every_row_that_stays_is_there_once(alive, seed):
    alive = np.array(alive)
    rows = np.random.default_rng(seed).permutation(len(alive))
    for ends in ([], group_ends(len(alive))):
        found, _ = after_moves(alive, rows, ends)
        assert sorted(found) == sorted(rows[alive])


def test_groups_stay_in_order_while_rows_leave_and_join():
    generator = np.random.default_rng(0)
    starts, next_start, ends = np.arange(COUNT), COUNT, group_ends(COUNT)
    num_left = num_moved = 0
    for _ in range(200):
        alive = generator.random(COUNT) > 0.1
        starts, moved = after_moves(alive, starts, ends)
        num_left, num_moved = num_left + (~alive).sum(), num_moved + moved
        joined = next_start + np.arange(COUNT - len(starts))
        starts, next_start = np.concatenate([starts, joined]), next_start + len(joined)
        for end in ends:
            assert starts[:end].max() < starts[end:].min()
    # An order of all rows would move about 14 per row that leaves.
    assert num_moved < 2.5 * num_left


def test_without_groups_no_more_rows_move_than_leave():
    alive = np.ones(COUNT, dtype=bool)
    alive[[0, 5, 30]] = False
    found, moved = after_moves(alive, np.arange(COUNT), [])
    assert moved == 2
    assert found[[0, 5]].tolist() == [29, 31]


@pytest.mark.parametrize(
    ("row_elements", "segments"),
    [
        (128, [Segment(0, 4, 0), Segment(4, 8, 150), Segment(8, COUNT, 200)]),
        (1, [Segment(0, COUNT, 0)]),
    ],
)
def test_a_segment_begins_where_it_saves_more_than_it_costs(row_elements, segments):
    starts = np.array([0, 9, 9, 9] + [150] * 4 + [200] * 23 + [210])
    assert plan_segments(starts, row_elements) == segments


def test_a_segment_sees_the_columns_of_all_its_rows():
    starts = np.random.default_rng(0).integers(0, 1000, COUNT)
    for part in plan_segments(starts, 512):
        assert starts[part.first : part.last].min() >= part.start
