from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rl_distributed.errors import ShardingError
from rl_distributed.named_sharding import NamedSharding


@st.composite
def grids(draw: st.DrawFn) -> NamedSharding:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    size = int(np.prod(shape))
    ranks = draw(st.permutations(range(size)))
    step = draw(st.integers(1, 3))
    layout = np.array(ranks).reshape(shape) * step
    return NamedSharding(layout, [f"axis{i}" for i in range(len(shape))])


@given(grids())
def test_coordinates_and_ranks_are_inverse(grid: NamedSharding) -> None:
    for rank in grid.layout.ravel().tolist():
        coords = grid.get_worker_coords(rank)
        assert list(coords) == grid.names
        assert grid.get_ranks(**coords) == rank
        assert grid.get_ranks_by_coord(**coords) == [rank]


@given(grids())
def test_parts_along_an_axis_partition_the_ranks(grid: NamedSharding) -> None:
    everything = sorted(grid.layout.ravel().tolist())
    for axis in grid.names:
        parts = [
            grid.get_ranks_by_coord(**{axis: index})
            for index in range(grid.get_axis_size(axis))
        ]
        assert sorted(itertools.chain(*parts)) == everything
        for index, ranks in enumerate(parts):
            part = grid.get_ranks(**{axis: index})
            if isinstance(part, NamedSharding):
                assert part.names == [name for name in grid.names if name != axis]
                assert sorted(part.layout.ravel().tolist()) == ranks
            else:
                assert [part] == ranks


@given(grids(), st.data())
def test_parts_are_those_of_the_array(grid: NamedSharding, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(grid.names), unique=True))
    coords = {name: data.draw(st.integers(0, grid.shape[name] - 1)) for name in chosen}
    place = tuple(coords.get(name, slice(None)) for name in grid.names)
    wanted = np.ravel(grid.layout[place]).tolist()
    assert grid.get_ranks_by_coord(**coords) == sorted(wanted)
    part: NamedSharding | int = grid
    for name, index in coords.items():  # one after the other, in any order
        assert isinstance(part, NamedSharding)
        part = part.get_ranks(**{name: index})
    assert part == (grid.get_ranks(**coords) if coords else grid)
    for rank in wanted:
        assert coords.items() <= grid.get_worker_coords(rank).items()


@given(grids())
def test_equality_hash_repr_and_pickle(grid: NamedSharding) -> None:
    same = NamedSharding(grid.layout.tolist(), grid.names)
    assert grid == same
    assert hash(grid) == hash(same)
    assert pickle.loads(pickle.dumps(grid)) == grid
    assert eval(repr(grid)) == grid
    assert grid != NamedSharding(grid.layout + 1, grid.names)
    assert grid != "grid"


def test_the_sizes() -> None:
    grid = NamedSharding([[0, 1, 2], [3, 4, 5]], ["data", "tensor"])
    assert grid.shape == {"data": 2, "tensor": 3}
    assert (grid.ndim, grid.size) == (2, 6)
    assert grid.get_axis_index("tensor") == 1
    assert grid.get_worker_coords(5) == {"data": 1, "tensor": 2}
    assert grid.get_ranks_by_coord() == [0, 1, 2, 3, 4, 5]


def test_the_layout_is_a_copy() -> None:
    grid = NamedSharding([0, 1], ["data"])
    grid.layout[0] = 7
    assert grid.layout.tolist() == [0, 1]


def test_an_absent_axis_counts_as_zero() -> None:
    assert NamedSharding.is_axis_zero({"a": 0, "b": 1}, ["a", "c"])
    assert not NamedSharding.is_axis_zero({"a": 0, "b": 1}, ["a", "b"])


@pytest.mark.parametrize(
    ("layout", "names", "expected"),
    [
        ([[0, 1], [2]], ["a", "b"], "regular grid"),
        ([0.0, 1.0], ["a"], "integer ranks"),
        ([True, False], ["a"], "integer ranks"),
        ([], ["a"], "at least one rank"),
        (3, [], "at least one rank"),
        ([0, 1], ["a", "b"], "as many axes"),
        ([0, 0, 1], ["a"], "every rank must occur once: 0"),
        ([0, -1], ["a"], "must not be negative: got -1"),
        ([[0, 1]], ["a", "a"], "name of its own: 'a'"),
        ([0, 1], "a", "list of axis names"),
        ([0, 1], [3], "list of axis names"),
        ([0, 1], [""], "list of axis names"),
    ],
)
def test_a_wrong_layout_is_refused(layout: Any, names: Any, expected: str) -> None:
    with pytest.raises(ShardingError, match=expected):
        NamedSharding(layout, names)


def test_wrong_questions_are_refused_alike() -> None:
    grid = NamedSharding([[0, 1], [2, 3]], ["data", "tensor"])
    for ask in (
        lambda: grid.get_ranks(dat=0),
        lambda: grid.get_ranks_by_coord(dat=0),
        lambda: grid.get_axis_index("dat"),
        lambda: grid.get_axis_size("dat"),
    ):
        with pytest.raises(ShardingError, match="no axis 'dat'; did you mean 'data'"):
            ask()
    for index in (2, -1, True, "0"):
        with pytest.raises(ShardingError, match=r"must be in 0\.\.1"):
            grid.get_ranks(data=index)  # type: ignore[arg-type]
        with pytest.raises(ShardingError, match=r"must be in 0\.\.1"):
            grid.get_ranks_by_coord(data=index)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="rank 9 is not in the sharding"):
        grid.get_worker_coords(9)
