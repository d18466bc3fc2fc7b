"""Tensors as numpy arrays for pickling, so that their memory travels out of band.

numpy hands its memory to pickle protocol 5 as a buffer. Ray puts such buffers into its
object store once and maps them into every reader, where a pickled torch tensor is
copied several times. Where torch is not installed, they arrive as numpy arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rl_distributed.batch.arrays import NUMPY_DTYPES, clone, is_array, is_tensor
from rl_distributed.extras import installed_torch, require_torch

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = [
    "EncodedList",
    "EncodedTensor",
    "carried",
    "decode",
    "encode",
    "own_memory",
]

# Types that numpy lacks travel as integers of the same size, bit by bit.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
# Types that hold no tensor, and those whose items are looked at; a subclass may mean
# something else by its items.
_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))
_CONTAINERS = frozenset((dict, list, tuple))


class _Leaf:
    """Stands in a list for a tensor; all of them are the same object."""

    def __reduce__(self) -> str:
        return "_LEAF"


_LEAF = _Leaf()


@dataclass(frozen=True)
class EncodedTensor:
    """A dense tensor or numpy array as an array, and the name of its dtype."""

    array: NDArray[Any]
    dtype: str


@dataclass(frozen=True)
class EncodedList:
    """A list with tensors at any depth of its lists, tuples and dicts.

    numpy arrays in lists are left to numpy's own pickling.

    The items of all tensors of one dtype lie in a row, so a list of many small tensors
    is a few buffers.
    """

    skeleton: Any
    """The list with a placeholder for each tensor; its length if it holds only them."""
    flats: tuple[EncodedTensor, ...]
    """One row of items per dtype."""
    kinds: NDArray[np.uint8]
    """For each tensor, in the order of the skeleton: its place in `flats`."""
    ranks: NDArray[np.uint8]
    """For each tensor: its number of dimensions."""
    sizes: NDArray[np.int64]
    """The sizes of all dimensions of all tensors."""


def encode(column: Any) -> Any:
    """Get a column in a form whose numbers pickle out of band; other values unchanged.

    Only values travel: gradients, devices and memory layout do not. A tensor that is
    not dense (sparse, quantized, without data) is left to torch's own pickling.
    """
    if is_tensor(column):
        return _encode_tensor(column) if _is_dense(column) else column
    if isinstance(column, list):
        return _encode_list(column)
    if isinstance(column, np.ndarray):
        return EncodedTensor(np.ascontiguousarray(column), column.dtype.name)
    return column


def decode(value: Any) -> Any:
    """Get the column that `encode` made `value` from; an array where torch is missing.

    Tensors share the memory of the pickled buffer. In Ray's object store that memory
    is mapped into every reader, and for torch it looks writable: what one writes in
    place, the others read. `own_memory` copies before a write.

    Raises:
        MissingExtraError: numpy lacks the dtype, and torch is not installed.
    """
    if isinstance(value, EncodedTensor):
        return _decode_array(value)
    if isinstance(value, EncodedList):
        return _decode_list(value)
    return value


def own_memory(value: Any) -> Any:
    """`value` with a copy of each tensor whose memory torch has not allocated itself.

    Of numpy arrays, those are copied whose memory numpy has not allocated, or that are
    read-only. Lists, tuples and dicts are searched at any depth and rebuilt where they
    hold such an array.
    """
    if is_array(value):
        return clone(value) if _is_borrowed(value) else value
    if not isinstance(value, list) or not any(map(_is_borrowed, _arrays(value))):
        return value
    return _rebuilt(value, own_memory)


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a dense tensor as a type that numpy has, bit by bit.

    Types that numpy lacks (bfloat16, the 8-bit floats, ...) become integers of the same
    size. The result is a view where that is possible.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_carrier(plain.dtype))


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
    )


def _is_borrowed(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return not (owner.flags.owndata and value.flags.writeable)
    # torch can resize the memory that it has allocated, and no other.
    return (
        is_tensor(value)
        and value.device.type == "cpu"
        and _is_dense(value)
        and not value.untyped_storage().resizable()
    )


def _arrays(value: Any) -> list[torch.Tensor]:
    """All tensors and numpy arrays in nested plain containers, in their order.

    Most lists hold texts and numbers, thousands of them: these are passed by first.
    """
    found: list[torch.Tensor] = []
    for item in value.values() if type(value) is dict else value:
        kind = type(item)
        if kind in _PLAIN:
            continue
        if kind in _CONTAINERS:
            found += _arrays(item)
        elif kind is np.ndarray or is_tensor(item):
            found.append(item)
    return found


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested containers with each leaf changed."""
    if type(value) is dict:
        return {key: _rebuilt(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, change) for item in value)
    return change(value)


def _is_leaf(value: Any) -> bool:
    return is_tensor(value) and _is_dense(value)


def _encode_list(column: list[Any]) -> Any:
    found = _arrays(column)
    tensors = [a for a in found if not isinstance(a, np.ndarray) and _is_dense(a)]
    if not tensors:
        return column
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    places = {dtype: place for place, dtype in enumerate(dtypes)}
    # One byte suffices: there are fewer dtypes and dimensions than 256.
    kinds = np.array([places[tensor.dtype] for tensor in tensors], dtype=np.uint8)
    only = len(tensors) == len(column) and all(map(_is_leaf, column))
    return EncodedList(
        len(column)
        if only
        else _rebuilt(column, lambda item: _LEAF if _is_leaf(item) else item),
        tuple(_encode_row(tensors, dtype) for dtype in dtypes),
        kinds,
        np.array([tensor.ndim for tensor in tensors], dtype=np.uint8),
        np.array([size for tensor in tensors for size in tensor.shape], dtype=np.int64),
    )


def _encode_row(tensors: list[torch.Tensor], dtype: torch.dtype) -> EncodedTensor:
    """Return the items of all tensors of one dtype in a row."""
    own = [tensor for tensor in tensors if tensor.dtype == dtype]
    # torch can join bfloat16, and no other type that numpy lacks.
    if _name(dtype) not in NUMPY_DTYPES and dtype != torch.bfloat16:
        own = [carried(tensor) for tensor in own]
    flat = [tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in own]
    row = torch.cat([tensor.cpu() for tensor in flat])
    return EncodedTensor(carried(row).numpy(), _name(dtype))


def _decode_list(value: EncodedList) -> list[Any]:
    if (value.ranks == 1).all():
        shapes, counts = None, value.sizes
    else:
        sizes = iter(value.sizes.tolist())
        shapes = [tuple(itertools.islice(sizes, rank)) for rank in value.ranks.tolist()]
        counts = np.array(list(map(math.prod, shapes)), dtype=np.int64)
    parts = [
        iter(_split(_decode_array(row), counts[value.kinds == kind]))
        for kind, row in enumerate(value.flats)
    ]
    tensors = [next(parts[kind]) for kind in value.kinds.tolist()]
    if shapes is not None:
        pairs = zip(tensors, shapes, strict=True)
        tensors = [tensor.reshape(shape) for tensor, shape in pairs]
    if isinstance(value.skeleton, int):
        return tensors
    following = iter(tensors)
    restored: list[Any] = _rebuilt(
        value.skeleton, lambda item: next(following) if item is _LEAF else item
    )
    return restored


def _split(row: Any, counts: NDArray[np.int64]) -> Sequence[Any]:
    """Parts of a row of items, which share its memory."""
    if is_tensor(row):
        return torch.split(row, counts.tolist())
    return np.split(row, np.cumsum(counts)[:-1])


def _encode_tensor(tensor: torch.Tensor) -> EncodedTensor:
    plain = carried(tensor).cpu().contiguous()
    return EncodedTensor(plain.numpy(), _name(tensor.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype itself, or one of the same size that numpy has."""
    if _name(dtype) in NUMPY_DTYPES:
        return dtype
    carrier: torch.dtype = getattr(torch, _CARRIERS[dtype.itemsize])
    return carrier


def _decode_array(value: EncodedTensor) -> Any:
    if installed_torch() is not None:
        return _decode_tensor(value)
    if value.dtype not in NUMPY_DTYPES:
        require_torch(f"a tensor of {value.dtype}, a dtype that numpy lacks,")
    return value.array


def _decode_tensor(value: EncodedTensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, value.dtype)
    if value.array.size == 0:
        return torch.empty(value.array.shape, dtype=_carrier(dtype)).view(dtype)
    array = value.array
    if not array.flags.writeable:
        array = np.asarray(_SharedMemory(array))
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


class _SharedMemory:
    """The memory of a read-only array without its read-only mark.

    torch has no read-only tensors and warns, once per process, about an array that is
    marked so. The promise not to write is in the docstring of `decode` instead.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the buffer alive
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
