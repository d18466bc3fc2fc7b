from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rl_distributed.errors import ShardingError
from rl_distributed.named_sharding import NamedSharding
from rl_distributed.workers.argument_split import (
    check_nested_lengths,
    check_worker_ranks,
    per_worker_kwargs,
    pick_slice,
    plan_rank_zero_call,
    plan_sharded_call,
)

GRID = NamedSharding([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["pp", "dp", "tp"])


@st.composite
def plans(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    names = [f"axis{i}" for i in range(len(sizes))]
    ranks = draw(st.permutations(range(int(np.prod(sizes)))))
    grid = NamedSharding(np.array(ranks).reshape(sizes), names)
    kinds = draw(st.lists(st.sampled_from("scf"), min_size=len(names), max_size=9))
    split = [n for n, kind in zip(names, kinds, strict=False) if kind == "s"]
    split = list(draw(st.permutations(split)))
    copied = [n for n, kind in zip(names, kinds, strict=False) if kind == "c"]
    same = draw(st.lists(st.sampled_from(names), unique=True))
    return grid, split, copied, same, draw(st.booleans())


@given(plans())
def test_plan_follows_its_definition(case):
    grid, split, copied, same, dummies = case
    plan = plan_sharded_call(grid, split, copied, same, dummies)
    free = [n for n in grid.names if n not in split and n not in copied]
    assert list(plan.called_workers) == sorted(set(plan.called_workers))
    place_of = dict(zip(plan.called_workers, plan.slices, strict=True))
    for worker in range(grid.size):
        coords = grid.get_worker_coords(worker)
        at_zero = all(coords[axis] == 0 for axis in free)
        assert (worker in place_of) == (at_zero or dummies)
        if at_zero:
            assert place_of[worker] == tuple(coords[axis] for axis in split)
        elif dummies:
            assert place_of[worker] is None
        answers = at_zero and all(coords[axis] == 0 for axis in same)
        assert (worker in plan.return_from_workers) == answers


@given(plans())
def test_every_slice_is_delivered_as_often_as_it_is_replicated(case):
    grid, split, copied, same, dummies = case
    plan = plan_sharded_call(grid, split, copied, same, dummies)
    degree = int(np.prod([grid.get_axis_size(axis) for axis in copied]))
    expected = dict.fromkeys(
        itertools.product(*(range(grid.get_axis_size(axis)) for axis in split)), degree
    )
    counted: dict[tuple[int, ...], int] = {}
    for place in plan.slices:
        if place is not None:
            counted[place] = counted.get(place, 0) + 1
    assert counted == expected
    assert plan.shares_slices == (degree > 1)


@given(plans())
def test_results_cover_every_slice_where_only_replicated_axes_answer_once(case):
    grid, split, copied, _, dummies = case
    plan = plan_sharded_call(grid, split, copied, copied, dummies)
    place_of = dict(zip(plan.called_workers, plan.slices, strict=True))
    answered = [place_of[worker] for worker in plan.return_from_workers]
    assert len(answered) == len(set(answered)) == int(np.prod(plan.axis_sizes))


def test_plan_of_a_known_grid():
    plan = plan_sharded_call(GRID, ["dp"], ["tp"], ["tp"])
    assert plan.called_workers == (0, 1, 2, 3)
    assert plan.slices == ((0,), (0,), (1,), (1,))
    assert plan.return_from_workers == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"in_sharded_axes": ["dpp"]}, "in_sharded_axes names 'dpp'.*did you mean"),
        ({"replicate_on_axes": ["tq"]}, "replicate_on_axes names 'tq'"),
        ({"output_is_replicated": ["x"]}, "output_is_replicated names 'x'"),
        ({"in_sharded_axes": "dp"}, "must be a list"),
        ({"in_sharded_axes": ["dp", "dp"]}, "twice"),
        ({"in_sharded_axes": ["dp"], "replicate_on_axes": ["dp"]}, "either split or"),
    ],
)
def test_wrong_axes(arguments, words):
    with pytest.raises(ShardingError, match=words):
        plan_sharded_call(GRID, **arguments)


def test_rank_zero_call():
    assert plan_rank_zero_call(None, 3) == [0, 1, 2]
    assert plan_rank_zero_call(GRID, 8, ["tp", "pp"]) == [0, 2]
    with pytest.raises(ShardingError, match="without sharding_annotations"):
        plan_rank_zero_call(None, 3, ["tp"])
    with pytest.raises(ShardingError, match="run_rank_0_only_axes names 'q'"):
        plan_rank_zero_call(GRID, 8, ["q"])


def test_worker_ranks():
    check_worker_ranks(GRID, 8)
    with pytest.raises(ShardingError, match="from 0 to 6"):
        check_worker_ranks(GRID, 7)
    with pytest.raises(ShardingError, match="from 0 to 1"):
        check_worker_ranks(NamedSharding([1, 2], ["dp"]), 2)


def test_nested_lists():
    check_nested_lengths("data", [[1, 2], [3, 4]], (2, 2), ("a", "b"))
    assert pick_slice([[1, 2], [3, 4]], (1, 0)) == 3
    assert pick_slice("whole", ()) == "whole"
    with pytest.raises(ShardingError, match=r"'data'.*axis 'b': got 1"):
        check_nested_lengths("data", [[1, 2], [3]], (2, 2), ("a", "b"))
    with pytest.raises(ShardingError, match=r"got dict.*common_kwargs"):
        check_nested_lengths("data", {}, (2,), ("a",))


def test_per_worker_kwargs():
    assert per_worker_kwargs({"a": [1, 2], "b": (3, 4)}, 2) == [
        {"a": 1, "b": 3},
        {"a": 2, "b": 4},
    ]
    with pytest.raises(ShardingError, match="at least one argument"):
        per_worker_kwargs({}, 2)
    with pytest.raises(ShardingError, match="got 1"):
        per_worker_kwargs({"a": [1]}, 2)
    with pytest.raises(ShardingError, match="got 3"):
        per_worker_kwargs({"a": [1, 2, 3]}, 2)
    with pytest.raises(ShardingError, match="got int"):
        per_worker_kwargs({"a": 1}, 2)
