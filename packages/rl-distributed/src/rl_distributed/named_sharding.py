"""`NamedSharding`: a grid of ranks with named axes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_distributed.errors import ShardingError
from rl_distributed.suggestion import did_you_mean

__all__ = ["NamedSharding"]


class NamedSharding:
    """An N-dimensional grid of unique ranks, each axis with a name.

    ```python
    grid = NamedSharding([[0, 1], [2, 3]], ["data", "tensor"])
    grid.get_worker_coords(2)  # {"data": 1, "tensor": 0}
    grid.get_ranks(data=1)  # NamedSharding([2, 3], ["tensor"])
    ```

    It is immutable and can be hashed. Ranks need not be contiguous, because a part of
    a grid is a grid.

    Args:
        layout: A nested sequence or array of integers, one dimension per axis.
        names: The names of the axes, outermost first.

    Raises:
        ShardingError: The layout is ragged, empty or not of integers, a rank is
            negative or occurs twice, or the names do not fit.
    """

    def __init__(
        self, layout: Sequence[Any] | NDArray[Any], names: Sequence[str]
    ) -> None:
        self._names = _checked_names(names)
        self._layout = _checked_layout(layout, self._names)
        # Instances are hashed by their layout, which must therefore never change.
        self._layout.setflags(write=False)
        flat = self._layout.ravel()
        self._position_of = {int(rank): place for place, rank in enumerate(flat)}

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis, by name."""
        return dict(zip(self._names, map(int, self._layout.shape), strict=True))

    @property
    def names(self) -> list[str]:
        """The names of the axes, outermost first."""
        return list(self._names)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._names)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self._layout.size)

    @property
    def layout(self) -> NDArray[np.int64]:
        """A copy of the grid."""
        return self._layout.copy()

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Return the index of a rank on every axis."""
        place = self._position_of.get(worker_id)
        if place is None:
            raise ShardingError(
                f"rank {worker_id!r} is not in the sharding; its ranks are "
                f"{_listed(sorted(self._position_of))}"
            )
        indices = np.unravel_index(place, self._layout.shape)
        return dict(zip(self._names, map(int, indices), strict=True))

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return the ranks at the given index of each named axis, sorted."""
        return sorted(int(rank) for rank in np.ravel(self._select(coords)))

    def get_ranks(self, **axis_index: int) -> NamedSharding | int:
        """Get the part of the grid at the given indices, over the axes that are left.

        With an index for every axis it is a single rank.
        """
        part = self._select(axis_index)
        left = [name for name in self._names if name not in axis_index]
        return NamedSharding(part, left) if left else int(part)

    def get_axis_index(self, name: str) -> int:
        """Return the position of an axis."""
        if name not in self._names:
            raise ShardingError(
                f"the sharding has no axis {name!r}{did_you_mean(name, self._names)} "
                f"(axes: {', '.join(self._names)})"
            )
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Return the number of indices on an axis."""
        return int(self._layout.shape[self.get_axis_index(name)])

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: Iterable[str]) -> bool:
        """Whether `coords` is 0 on all `axes`; an axis that it lacks counts as 0."""
        return all(coords.get(axis, 0) == 0 for axis in axes)

    def _select(self, axis_index: Mapping[str, int]) -> NDArray[np.int64]:
        selection: list[int | slice] = [slice(None)] * self.ndim
        for name, index in axis_index.items():
            axis = self.get_axis_index(name)
            size = self._layout.shape[axis]
            if not _is_integer(index) or not 0 <= index < size:
                raise ShardingError(
                    f"index on axis {name!r} must be in 0..{size - 1}: got {index!r}"
                )
            selection[axis] = int(index)
        part: NDArray[np.int64] = self._layout[tuple(selection)]
        return part

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(
            self._layout, other._layout
        )

    def __hash__(self) -> int:
        return hash((self._names, self._layout.shape, self._layout.tobytes()))

    def __repr__(self) -> str:
        return f"NamedSharding({self._layout.tolist()}, {list(self._names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedSharding, (self._layout.tolist(), list(self._names))


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(
        isinstance(name, str) and name for name in names
    ):
        raise ShardingError(f"names must be a list of axis names: got {names!r}")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ShardingError(
            f"every axis needs a name of its own: {', '.join(map(repr, twice))} "
            f"occurs more than once in {list(names)}"
        )
    return tuple(names)


def _checked_layout(
    layout: Sequence[Any] | NDArray[Any], names: tuple[str, ...]
) -> NDArray[np.int64]:
    try:
        # A copy, so that later changes of the caller's array have no effect.
        array = np.array(layout)
    except ValueError:
        raise ShardingError(
            f"layout must be a regular grid, with lists of equal length: got {layout!r}"
        ) from None
    if array.ndim == 0 or array.size == 0:
        raise ShardingError(f"layout must hold at least one rank: got {layout!r}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ShardingError(f"layout must hold integer ranks: got {array.tolist()!r}")
    if array.ndim != len(names):
        raise ShardingError(
            f"layout and names must have as many axes: the layout has {array.ndim} "
            f"(shape {array.shape}), names are {list(names)}"
        )
    if array.min() < 0:
        raise ShardingError(f"ranks must not be negative: got {int(array.min())}")
    ranks, counts = np.unique(array, return_counts=True)
    if (counts > 1).any():
        raise ShardingError(
            "every rank must occur once: "
            f"{_listed(ranks[counts > 1].tolist())} occur more than once"
        )
    return array.astype(np.int64)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _listed(ranks: Sequence[int], most: int = 16) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown}, ... ({len(ranks)} in all)"
