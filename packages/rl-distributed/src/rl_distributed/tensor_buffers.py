"""Tensors as numpy arrays for pickling, so that their memory travels out of band.

numpy hands its memory to pickle protocol 5 as a buffer. Ray puts such buffers into its
object store once and maps them into every reader, where a pickled torch tensor is
copied several times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["EncodedRagged", "EncodedTensor", "decode", "encode"]

# Types that numpy lacks travel as integers of the same size, bit by bit.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_HAS = frozenset(
    (
        torch.bool,
        torch.uint8,
        torch.int8,
        *(torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
)


@dataclass(frozen=True)
class EncodedTensor:
    """A dense tensor as an array, and the name of its dtype."""

    array: np.ndarray[Any, Any]
    dtype: str


@dataclass(frozen=True)
class EncodedRagged:
    """A list of 1-D tensors of one dtype: all their items in a row, and their sizes."""

    flat: EncodedTensor
    sizes: np.ndarray[Any, Any]


def encode(column: Any) -> Any:
    """A column in a form whose numbers pickle out of band; other values unchanged.

    Only values travel: gradients, devices and memory layout do not.
    """
    if isinstance(column, torch.Tensor):
        dense = column.layout == torch.strided and not column.is_meta
        return _encode_tensor(column) if dense and not column.is_quantized else column
    if isinstance(column, list) and _is_ragged(column):
        sizes = np.array([item.numel() for item in column], dtype=np.int64)
        return EncodedRagged(_encode_tensor(torch.cat(column)), sizes)
    return column


def decode(value: Any) -> Any:
    """The column that `encode` made `value` from.

    Tensors share the memory of the pickled buffer. Where that is read-only, as in
    Ray's object store, they must not be written to in place; clone them first.
    """
    if isinstance(value, EncodedTensor):
        return _decode_tensor(value)
    if isinstance(value, EncodedRagged):
        return list(torch.split(_decode_tensor(value.flat), value.sizes.tolist()))
    return value


def _is_ragged(column: list[Any]) -> bool:
    if not column or not isinstance(column[0], torch.Tensor):
        return False
    dtype = column[0].dtype
    return all(
        isinstance(item, torch.Tensor)
        and item.ndim == 1
        and item.dtype == dtype
        and item.layout == torch.strided
        and item.device.type == "cpu"
        for item in column
    )


def _encode_tensor(tensor: torch.Tensor) -> EncodedTensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.dtype not in _NUMPY_HAS:
        plain = plain.view(_CARRIERS[plain.element_size()])
    return EncodedTensor(plain.numpy(), str(tensor.dtype).removeprefix("torch."))


def _decode_tensor(value: EncodedTensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, value.dtype)
    if value.array.size == 0:
        return torch.empty(value.array.shape, dtype=dtype)
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

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array  # keeps the buffer alive
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
