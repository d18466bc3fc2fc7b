"""Messages of one transfer, made one by one: those that `verified_stream` sends.

```
tensors -> buckets by bytes -> cast, pack, digest -> block ... -> end: manifest
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from rl_distributed.batch.tensor_buffers import carried
from rl_distributed.errors import TransferError
from rl_distributed.transfer.manifest import (
    TensorEntry,
    digest_of,
    dtype_name,
    piece_bytes,
)
from rl_distributed.transfer.protocol import Header

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["BlockPacker", "tensor_buckets", "tensor_messages"]

# Every tensor begins where any dtype may, and on a cache line of its own.
_ALIGNMENT = 64

Pairs: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"


def tensor_messages(
    tensors: Mapping[str, torch.Tensor] | Pairs,
    buffer: Callable[[int], torch.Tensor],
    *,
    label: str = "",
    bucket_bytes: int = 64 << 20,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[Header, torch.Tensor | None]]:
    """Header and block of each message of a transfer, when they are asked for.

    `send_tensors` puts them into a link. Call it directly to bring the messages, in
    order, to a `ReceivingEnd` by other means; `receive_tensors` reads them there.

    Args:
        tensors: Dense tensors by unique names; an iterable is consumed on the way.
        buffer: Gives `[num_bytes]` uint8 for the next block. It may give the same
            memory again: a block is done with when the next message is asked for.
        label: Name of the transfer, for the manifest.
        bucket_bytes: Tensors travel together up to this size; a larger one alone.
        dtype: Floating-point tensors are cast to it while they are packed.

    Yields:
        A message for each bucket, then the end with the entries of all.

    Raises:
        TransferError: A name occurs twice, or a tensor is not dense.
    """
    if bucket_bytes < 1:
        raise TransferError(f"bucket_bytes must be positive: got {bucket_bytes}")
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    packer = BlockPacker(buffer, label=label, dtype=dtype)
    for bucket in tensor_buckets(_checked(pairs), bucket_bytes, dtype):
        yield packer.block(bucket)
    yield packer.end()


class BlockPacker:
    """Makes the messages of one transfer from buckets of tensors.

    Args:
        buffer: See `tensor_messages`.
        label: Name of the transfer, for the manifest.
        dtype: Floating-point tensors are cast to it while they are packed.
    """

    def __init__(
        self,
        buffer: Callable[[int], torch.Tensor],
        *,
        label: str = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        self._buffer = buffer
        self._label = label
        self._dtype = dtype
        self._number = 0
        self._sent: list[TensorEntry] = []

    def block(
        self, bucket: list[tuple[str, torch.Tensor]]
    ) -> tuple[Header, torch.Tensor]:
        """Return the message of the next bucket."""
        dtype = self._dtype
        block = self._buffer(sum(_aligned(_num_bytes(t, dtype)) for _, t in bucket))
        entries = _pack(bucket, block, dtype)
        header = Header("block", self._number, self._label, entries)
        self._sent += entries
        self._number += 1
        return header, block

    def end(self) -> tuple[Header, None]:
        """Return the last message, with the entries of all buckets."""
        return Header("end", self._number, self._label, tuple(self._sent)), None


def tensor_buckets(
    pairs: Pairs, bucket_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield the tensors that travel together.

    It looks at their shapes and dtypes only.
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in pairs:
        needed = _aligned(_num_bytes(tensor, dtype))
        if bucket and size + needed > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += needed
    if bucket:
        yield bucket


def _checked(pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[str] = set()
    for name, tensor in pairs:
        if name in seen:
            raise TransferError(f"tensor {name!r} occurs twice; names must be unique")
        # Such tensors are not one run of bytes that could be copied.
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise TransferError(
                f"tensor {name!r} must be dense and have values: got {tensor.layout} "
                f"on {tensor.device}; convert it before it is sent"
            )
        seen.add(name)
        yield name, tensor


def _sent_as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or not tensor.is_floating_point():
        return tensor.dtype
    return dtype


def _num_bytes(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * _sent_as(tensor, dtype).itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _pack(
    bucket: list[tuple[str, torch.Tensor]],
    block: torch.Tensor,
    dtype: torch.dtype | None,
) -> tuple[TensorEntry, ...]:
    """Copy the tensors of a bucket into one block."""
    entries = []
    start = 0
    for name, tensor in bucket:
        sent_as = _sent_as(tensor, dtype)
        num_bytes = tensor.numel() * sent_as.itemsize
        is_cast = sent_as != tensor.dtype
        # Casting needs the numbers; copying needs only the bits, so types that numpy
        # lacks travel as integers.
        values = tensor.detach() if is_cast else carried(tensor)
        place = block[start : start + num_bytes]
        digest = _copy(values, place, sent_as if is_cast else values.dtype)
        shape = tuple(tensor.shape)
        entries.append(TensorEntry(name, dtype_name(sent_as), shape, digest, start))
        start += _aligned(num_bytes)
    return tuple(entries)


def _copy(values: torch.Tensor, data: torch.Tensor, dtype: torch.dtype) -> str:
    """Copy values to a place of bytes, as a dtype; gives the digest of its bytes."""
    place = data.view(dtype)
    # Copying in pieces pays off only if the digest then finds them in the CPU cache.
    is_near = values.device.type == data.device.type == "cpu"
    if not is_near or data.numel() <= piece_bytes() or not values.is_contiguous():
        place.view(values.shape).copy_(values)
        return digest_of(data)
    return digest_of(data, _copied(values.view(-1), place))


def _copied(values: torch.Tensor, place: torch.Tensor) -> Iterator[None]:
    """Copy piece by piece."""
    size = piece_bytes() // place.element_size()
    for begin in range(0, place.numel(), size):
        place[begin : begin + size].copy_(values[begin : begin + size])
        yield
