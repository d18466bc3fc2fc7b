"""Plan which workers a call reaches, with which slices, and whose results count.

Pure functions.

The axes of a group's `NamedSharding` fall in three kinds for one call:

```
sharded      every coordinate has its own slice of the arguments
replicated   every coordinate has the same slice
free         only coordinate 0 is called (or all, the others without arguments)
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_distributed.errors import ShardingError
from rl_distributed.suggestion import did_you_mean

if TYPE_CHECKING:
    from rl_distributed.named_sharding import NamedSharding

__all__ = [
    "CallPlan",
    "check_given_once",
    "check_nested_lengths",
    "check_worker_ranks",
    "merged_kwargs",
    "per_worker_kwargs",
    "pick_slice",
    "plan_rank_zero_call",
    "plan_sharded_call",
]


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call of a method on a group."""

    called_workers: tuple[int, ...]
    """Workers that are called, ascending."""
    slices: tuple[tuple[int, ...] | None, ...]
    """For each called worker where its slice lies in the nested lists, by sharded axis;
    None: a dummy call, with None for every argument."""
    return_from_workers: tuple[int, ...]
    """Workers whose results are kept, ascending."""
    axis_sizes: tuple[int, ...]
    """Length that the nested lists must have at each depth."""
    axes: tuple[str, ...]
    """Names of the sharded axes, by depth."""

    @property
    def shares_slices(self) -> bool:
        """Whether some slice goes to more than one worker."""
        real = [place for place in self.slices if place is not None]
        return len(set(real)) < len(real)


def _check_axes(
    sharding: NamedSharding, argument: str, axes: Sequence[str] | None
) -> list[str]:
    # A string is a sequence too: its letters would be reported as unknown axes.
    if isinstance(axes, str):
        raise ShardingError(
            f"{argument} must be a list of axis names: got the string {axes!r}; "
            f"write [{axes!r}]"
        )
    names = list(axes or [])
    for name in names:
        if name not in sharding.names:
            raise ShardingError(
                f"{argument} names {name!r}, which is no axis of the group; it has "
                f"{list(sharding.names)}{did_you_mean(name, sharding.names)}"
            )
    if len(set(names)) != len(names):
        raise ShardingError(f"{argument} names an axis twice: got {names}")
    return names


def check_worker_ranks(sharding: NamedSharding, num_workers: int) -> None:
    """Check that the layout has every worker 0 .. n-1 once.

    Raises:
        ShardingError: ranks are missing or too many.
    """
    # A `NamedSharding` that is part of a larger grid may skip ranks; a
    # list of workers cannot.
    ranks = sorted(int(rank) for rank in sharding.layout.flatten())
    if ranks != list(range(num_workers)):
        raise ShardingError(
            f"sharding_annotations must hold each rank from 0 to {num_workers - 1} "
            f"once, one for each worker of the group: got {len(ranks)} ranks "
            f"{ranks[:16]}"
        )


def plan_sharded_call(
    sharding: NamedSharding,
    in_sharded_axes: Sequence[str] | None = None,
    replicate_on_axes: Sequence[str] | None = None,
    output_is_replicated: Sequence[str] | None = None,
    make_dummy_calls_to_free_axes: bool = False,
) -> CallPlan:
    """Decide which workers are called with which slice, and whose results are kept.

    Args:
        sharding: the axes of the group.
        in_sharded_axes: axes along which the arguments are split, outermost first.
        replicate_on_axes: axes along which the same slice goes to every coordinate.
        output_is_replicated: axes along which all results are the same, so that only
            coordinate 0 answers.
        make_dummy_calls_to_free_axes: call the workers at other coordinates of the
            remaining axes as well, with None for every argument.

    Raises:
        ShardingError: an axis is unknown, named twice, or both split and replicated.
    """
    split = _check_axes(sharding, "in_sharded_axes", in_sharded_axes)
    copied = _check_axes(sharding, "replicate_on_axes", replicate_on_axes)
    same_output = _check_axes(sharding, "output_is_replicated", output_is_replicated)
    both = [axis for axis in split if axis in copied]
    if both:
        raise ShardingError(
            f"axes {both} are in in_sharded_axes and in replicate_on_axes; "
            "an axis is either split or replicated"
        )
    free = [name for name in sharding.names if name not in split and name not in copied]

    called: list[int] = []
    slices: list[tuple[int, ...] | None] = []
    answering: list[int] = []
    for worker in range(sharding.size):
        coordinates = sharding.get_worker_coords(worker)
        has_data = all(coordinates[axis] == 0 for axis in free)
        if not has_data and not make_dummy_calls_to_free_axes:
            continue
        called.append(worker)
        slices.append(tuple(coordinates[axis] for axis in split) if has_data else None)
        # A dummy call computes with None, so its result never counts as an answer.
        if has_data and all(coordinates[axis] == 0 for axis in same_output):
            answering.append(worker)
    return CallPlan(
        tuple(called),
        tuple(slices),
        tuple(answering),
        tuple(sharding.get_axis_size(axis) for axis in split),
        tuple(split),
    )


def plan_rank_zero_call(
    sharding: NamedSharding | None,
    num_workers: int,
    run_rank_0_only_axes: Sequence[str] | None = None,
) -> list[int]:
    """Workers that are called where some axes run on coordinate 0 only.

    Raises:
        ShardingError: axes are named but unknown, or the group has none.
    """
    if not run_rank_0_only_axes:
        return list(range(num_workers))
    if sharding is None:
        raise ShardingError(
            "run_rank_0_only_axes needs named axes, but the group was made without "
            "sharding_annotations; pass a NamedSharding when making the group"
        )
    axes = _check_axes(sharding, "run_rank_0_only_axes", run_rank_0_only_axes)
    return [
        worker
        for worker in range(num_workers)
        if all(sharding.get_worker_coords(worker)[axis] == 0 for axis in axes)
    ]


def check_nested_lengths(
    name: str, value: Any, axis_sizes: Sequence[int], axes: Sequence[str]
) -> None:
    """Check that nested lists have the length of the sharded axis at each depth.

    Raises:
        ShardingError: something is not a list, or a list has another length.
    """
    if not axis_sizes:
        return
    size, axis = axis_sizes[0], axes[0]
    if not isinstance(value, list | tuple):
        raise ShardingError(
            f"argument {name!r} must be a list with one item for each of the {size} "
            f"coordinates of axis {axis!r}: got {type(value).__name__}; split it first "
            "(shard_by_batch_size), or pass it in common_kwargs"
        )
    if len(value) != size:
        raise ShardingError(
            f"argument {name!r} must have one item for each of the {size} coordinates "
            f"of axis {axis!r}: got {len(value)}"
        )
    for item in value:
        check_nested_lengths(name, item, axis_sizes[1:], axes[1:])


def pick_slice(value: Any, place: Sequence[int]) -> Any:
    """Return the item of nested lists at these coordinates."""
    for index in place:
        value = value[index]
    return value


def per_worker_kwargs(
    lists: Mapping[str, Sequence[Any]], num_workers: int
) -> list[dict[str, Any]]:
    """Turn keyword -> one item per worker into one set of keywords per worker.

    Raises:
        ShardingError: a value is no list of that length.
    """
    if not lists:
        raise ShardingError(
            "run_all_workers_multiple_data needs at least one argument with an item "
            "per worker; use run_all_workers_single_data where there is none"
        )
    for name, items in lists.items():
        if not isinstance(items, list | tuple):
            raise ShardingError(
                f"argument {name!r} must be a list with one item for each of the "
                f"{num_workers} workers: got {type(items).__name__}; pass what is the "
                "same for all in common_kwargs"
            )
        if len(items) != num_workers:
            raise ShardingError(
                f"argument {name!r} must have one item for each of the {num_workers} "
                f"workers that are called: got {len(items)}"
            )
    return [
        {name: items[position] for name, items in lists.items()}
        for position in range(num_workers)
    ]


def merged_kwargs(
    name: str, more: Mapping[str, Any] | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Get the arguments of a method that were given by name and in the mapping `name`.

    Raises:
        ShardingError: one was given in both ways.
    """
    if not more:
        return kwargs
    check_given_once(name, more, kwargs)
    return {**kwargs, **more}


def check_given_once(
    name: str, more: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise `ShardingError` if an argument of the mapping `name` was given by name."""
    # A plain merge would silently let one of the two values win.
    twice = sorted(more.keys() & kwargs.keys())
    if twice:
        raise ShardingError(
            f"arguments {twice} are given both in {name} and by themselves"
        )
