"""Columns of a batch: arrays of numbers or lists that have one item per row."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rl_distributed.batch import arrays
from rl_distributed.errors import BatchError
from rl_distributed.suggestion import did_you_mean

if TYPE_CHECKING:
    import torch

__all__ = [
    "Column",
    "as_column",
    "column_of",
    "concat_columns",
    "cut_column",
    "num_rows",
    "repeat_column",
    "require_values",
    "row_indices",
    "select_rows",
]

Column: TypeAlias = "torch.Tensor | list[Any]"


def num_rows(column: Column) -> int:
    """Return the number of rows; quicker than the `len` of a tensor."""
    return len(column) if isinstance(column, list) else int(column.shape[0])


def as_column(name: str, value: Any) -> Column:
    """`value` as a column: a tensor or list stays, a numpy array is looked at.

    Where torch is installed, numbers become a tensor that shares the array's memory
    where that is possible; elsewhere they stay. Strings and objects become a list.

    Raises:
        BatchError: `value` is something else, or has no row dimension.
    """
    if arrays.is_tensor(value) and value.ndim > 0:
        return value
    if isinstance(value, list):
        return value
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return _from_array(name, value)
    if arrays.is_array(value) or isinstance(value, np.generic):
        raise BatchError(
            f"column {name!r} must have one item per row: got a single "
            f"{type(value).__name__} {value!r}; give it a first dimension"
        )
    hint = "; use list(...)" if isinstance(value, tuple | range | dict | set) else ""
    raise BatchError(
        f"column {name!r} must be a tensor, a list or a numpy array: got "
        f"{type(value).__name__}{hint}"
    )


def _from_array(name: str, array: np.ndarray[Any, Any]) -> Column:
    # Objects and strings, which tensors cannot hold.
    if array.dtype.kind in "OUST":
        items: list[Any] = array.tolist()
        return items
    try:
        return arrays.from_numpy(array)
    except TypeError:
        raise BatchError(
            f"column {name!r} has the dtype {array.dtype}, which torch lacks; convert "
            "it to numbers or to a list"
        ) from None


def require_values(name: str, value: Any) -> None:
    """Raise `BatchError` if `value` is a tensor of the meta device.

    Args:
        name: Name of the value in messages.
        value: A column or index; anything else passes.
    """
    if arrays.is_tensor(value) and value.is_meta:
        raise BatchError(
            f"{name} must hold values: it is a tensor on the meta device, which has "
            "only a shape; make it on a real device, such as cpu"
        )


def row_indices(
    indices: Sequence[int] | torch.Tensor | np.ndarray[Any, Any], num_rows: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Row numbers from integers in any order, or from one boolean per row.

    Raises:
        BatchError: An index lies outside the rows, is no integer, or has no value.
    """
    require_values("a selection of rows", indices)
    array = arrays.to_numpy(indices)
    # numpy turns an empty list into an array of floats.
    if array.size == 0 and array.dtype.kind != "b":
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise BatchError(
            f"rows are selected by a list of integers or booleans: got {array.dtype} "
            f"of shape {array.shape}"
        )
    if array.dtype.kind == "b":
        if array.size != num_rows:
            raise BatchError(
                f"a boolean selection needs one value per row: got {array.size} for "
                f"{num_rows} rows"
            )
        return np.flatnonzero(array).astype(np.int64)
    outside = array[(array < 0) | (array >= num_rows)]
    if outside.size:
        raise BatchError(f"row {outside[0]} does not exist: there are {num_rows} rows")
    return array.astype(np.int64)


def column_of(data: Mapping[str, Any], key: str) -> Column:
    """Return the column called `key`, or a `BatchError` that lists those there are."""
    if key not in data:
        raise BatchError(
            f"the batch has no column {key!r}{did_you_mean(key, data)} "
            f"(columns: {', '.join(data)})"
        )
    column: Column = data[key]
    return column


def cut_column(column: Column, start: int, end: int) -> Column:
    """Rows `[start, end)`; of an array, a view."""
    return column[start:end]


def select_rows(
    column: Column, rows: Sequence[int], index: np.ndarray[Any, np.dtype[np.int64]]
) -> Column:
    """Return the given rows, which come both as a sequence and as an array."""
    if isinstance(column, list):
        return [column[row] for row in rows]
    return arrays.take(column, index)


def repeat_column(column: Column, num_repeats: int) -> Column:
    """Each row `num_repeats` times in a row; list items are deep copies."""
    if isinstance(column, list):
        return [copy.deepcopy(item) for item in column for _ in range(num_repeats)]
    return arrays.repeat(column, num_repeats)


def concat_columns(
    name: str, parts: Sequence[Column], pad_value: float | int | bool = 0
) -> Column:
    """One column below the other; dimension 1 of arrays is padded to the widest."""
    lists = [part for part in parts if isinstance(part, list)]
    tensors = [part for part in parts if not isinstance(part, list)]
    if lists and tensors:
        raise BatchError(
            f"column {name!r} is a tensor in some batches, a list in others"
        )
    if lists:
        return [item for part in lists for item in part]
    for trait in ("dtype", "device", "ndim"):
        # Older numpy arrays do not say that they are on the CPU.
        found = list(dict.fromkeys([getattr(part, trait, "cpu") for part in tensors]))
        if len(found) > 1:
            raise BatchError(
                f"column {name!r} must have the same {trait} in all batches: got "
                f"{', '.join(map(str, found))}"
            )
    first = tensors[0]
    # No padding is needed, so one concatenation suffices.
    if first.ndim == 1 or len({part.shape[1:] for part in tensors}) == 1:
        return arrays.concat(tensors)
    trailing = list(dict.fromkeys(tuple(part.shape[2:]) for part in tensors))
    if len(trailing) > 1:
        raise BatchError(
            f"column {name!r} may differ in dimension 1 only: got trailing dimensions "
            f"{', '.join(map(str, trailing))}"
        )
    return arrays.concat_padded(tensors, pad_value)
