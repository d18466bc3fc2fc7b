"""Numbers of a batch: tensors if torch is installed, otherwise numpy arrays.

All differences between the two are handled here. A process uses only one kind: the
other is converted on entry, sharing its memory if possible. Type checkers see tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from rl_distributed.extras import installed_torch, require_torch

if TYPE_CHECKING:
    import torch

__all__ = [
    "NUMPY_DTYPES",
    "as_array",
    "clone",
    "concat",
    "concat_padded",
    "from_numpy",
    "full",
    "is_array",
    "is_tensor",
    "narrow",
    "repeat",
    "take",
    "to_device",
    "to_numpy",
]

NUMPY_DTYPES = frozenset(
    (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("uint16", "uint32", "uint64", "float16", "float32", "float64"),
        *("complex64", "complex128"),
    )
)
"""Names of the dtypes that both torch and numpy have."""


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor; does not import torch, without which there is none.

    A module that another thread is importing may lack its classes still.
    """
    module = sys.modules.get("torch")
    try:
        return module is not None and isinstance(value, module.Tensor)
    except AttributeError:
        return False


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or a numpy array."""
    return isinstance(value, np.ndarray) or is_tensor(value)


# ------------------------------------------------------------------------- conversion


def from_numpy(array: NDArray[Any]) -> torch.Tensor:
    """Return the numbers of an array; they share its memory where that is possible.

    Raises:
        TypeError: The dtype is none of `NUMPY_DTYPES`.
    """
    if array.dtype.name not in NUMPY_DTYPES:
        raise TypeError(f"there are no tensors of the numpy dtype {array.dtype}")
    # torch supports only the machine's native byte order.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    module = installed_torch()
    if module is None:
        return native  # type: ignore[return-value]
    # torch supports neither read-only arrays nor negative strides.
    if not native.flags.writeable or any(stride < 0 for stride in native.strides):
        native = native.copy()
    tensor: torch.Tensor = module.from_numpy(native)
    return tensor


def to_numpy(values: Any) -> NDArray[Any]:
    """Make an array of a tensor on any device, an array, or a list of numbers."""
    if not is_tensor(values):
        return np.asarray(values)
    tensor = values.detach().cpu()
    if str(tensor.dtype).removeprefix("torch.") not in NUMPY_DTYPES:
        # bfloat16 and the 8-bit floats fit into float32 without loss.
        tensor = tensor.float()
    return tensor.numpy()


def as_array(values: Any, dtype: str) -> torch.Tensor:
    """Return a tensor as it is; a list or a numpy array as numbers of the dtype."""
    if is_tensor(values):
        return values
    return from_numpy(np.asarray(values, dtype=dtype))


def full(size: int, value: float | bool, dtype: str) -> torch.Tensor:
    """`size` equal numbers."""
    return from_numpy(np.full(size, value, dtype=dtype))


# ----------------------------------------------------------------------------- rows


def clone(array: torch.Tensor) -> torch.Tensor:
    """Return a copy with memory of its own."""
    return array.clone() if is_tensor(array) else array.copy()  # type: ignore[attr-defined]


def take(array: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """Return the given rows."""
    if not is_tensor(array):
        return array.take(rows, axis=0)  # type: ignore[call-arg,arg-type]
    # The index must be on the same device as the data.
    index: torch.Tensor = require_torch("a tensor").from_numpy(rows)
    return array.index_select(0, index.to(array.device))


def repeat(array: torch.Tensor, num_repeats: int) -> torch.Tensor:
    """Each row `num_repeats` times in a row."""
    if is_tensor(array):
        return array.repeat_interleave(num_repeats, dim=0)
    return np.repeat(array, num_repeats, axis=0)  # type: ignore[return-value]


def concat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One below the other; all have the same shape but for the rows."""
    if is_tensor(parts[0]):
        joined: torch.Tensor = require_torch("a tensor").cat(list(parts))
        return joined
    return np.concatenate(parts)  # type: ignore[return-value]


def concat_padded(parts: Sequence[torch.Tensor], pad_value: float) -> torch.Tensor:
    """One below the other; dimension 1 is padded to the widest."""
    first = parts[0]
    width = max(part.shape[1] for part in parts)
    shape = (sum(part.shape[0] for part in parts), width, *first.shape[2:])
    result: Any
    # Filled in one pass; padding each part first would copy everything twice.
    if is_tensor(first):
        result = first.new_full(shape, pad_value)
    else:
        result = np.full(shape, pad_value, dtype=first.dtype)
    into, rows = _writable(result, parts)
    start = 0
    for part in rows:
        into[start : start + part.shape[0], : part.shape[1]] = part
        start += part.shape[0]
    filled: torch.Tensor = result
    return filled


def _writable(result: Any, parts: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return an array and what is copied into it, by numpy where that is possible.

    Many small parts are then copied in a quarter of the time.
    """
    if not is_tensor(result) or result.device.type != "cpu":
        return result, parts
    try:
        return result.numpy(), [part.numpy() for part in parts]
    except (RuntimeError, TypeError):
        # Parts with a gradient, or a dtype that numpy does not have (bfloat16).
        return result, parts


# --------------------------------------------------------------------- whole columns


def narrow(array: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return the first `size` entries of a dimension; a view."""
    return array[(*(slice(None),) * dim, slice(0, size))]


def to_device(array: torch.Tensor, device: torch.device | str | int) -> torch.Tensor:
    """Return the array on a device; numpy arrays are on `cpu`, and nowhere else.

    Raises:
        MissingExtraError: Another device is asked for, and torch is not installed.
    """
    if is_tensor(array):
        return array.to(device)
    if str(device) != "cpu":
        require_torch(f"moving columns to the device {device!r}")
    return array
