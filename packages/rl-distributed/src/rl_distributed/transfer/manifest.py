"""Manifest of a transfer: names, shapes, dtypes and digests of its tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = [
    "Manifest",
    "TensorEntry",
    "digest_of",
    "dtype_name",
    "piece_bytes",
]

_COLUMNS = 1024
_ROW_BYTES = 8 * _COLUMNS
# Both sums of a piece are made while it lies in a cache of the CPU.
_ROWS_AT_ONCE, _ROWS_AMONG_THREADS = 64, 31


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a transfer."""

    name: str
    dtype: str
    """Name of the torch dtype, such as `float32`."""
    shape: tuple[int, ...]
    digest: str
    """`digest_of` its bytes."""
    # Not compared, because files store tensors in another order than blocks.
    start: int = field(default=0, compare=False)
    """Where its bytes begin in the block that it travels in."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        return int(torch.Size(self.shape).numel()) * self.torch_dtype.itemsize

    def to_json(self) -> list[Any]:
        """Plain values for JSON."""
        return [self.name, self.dtype, list(self.shape), self.digest, self.start]

    @classmethod
    def from_json(cls, value: list[Any]) -> TensorEntry:
        """Undo `to_json`."""
        name, dtype, shape, digest, start = value
        return cls(name, dtype, tuple(shape), digest, start)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of a transfer, in the order in which they were sent."""

    entries: tuple[TensorEntry, ...]
    label: str = ""
    """The sender's name for the transfer, such as a version."""

    @property
    def digest(self) -> str:
        """One digest of names, shapes, dtypes, digests and the label.

        Equal where the same tensors were sent and received, in any order.
        """
        # Sorted and without `start`, because order and place depend on the link.
        entries = sorted(entry.to_json()[:-1] for entry in self.entries)
        text = json.dumps([self.label, entries])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries)

    def differences(self, received: Manifest) -> list[str]:
        """Return what is missing, extra or other in `received`, in words.

        Empty if equal.
        """
        sent = {entry.name: entry for entry in self.entries}
        found = {entry.name: entry for entry in received.entries}
        problems = [f"{name} is missing" for name in sent if name not in found]
        problems += [f"{name} was not sent" for name in found if name not in sent]
        for name, entry in sent.items():
            if name in found and found[name] != entry:
                problems.append(f"{name} {_difference(entry, found[name])}")
        if self.label != received.label:
            problems.append(
                f"the label is {received.label!r} instead of {self.label!r}"
            )
        return problems


def _difference(sent: TensorEntry, found: TensorEntry) -> str:
    if sent.shape != found.shape:
        return f"has shape {list(found.shape)} instead of {list(sent.shape)}"
    if sent.dtype != found.dtype:
        return f"has dtype {found.dtype} instead of {sent.dtype}"
    return "has other values (its digest differs)"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def piece_bytes() -> int:
    """Return the number of bytes of CPU memory that `digest_of` reads at once."""
    # Where torch has several threads, it shares larger pieces out to them, which costs
    # more than it takes.
    rows = _ROWS_AT_ONCE if torch.get_num_threads() == 1 else _ROWS_AMONG_THREADS
    return rows * _ROW_BYTES


def digest_of(data: torch.Tensor, fill: Iterator[object] | None = None) -> str:
    """Return a digest of bytes that is made about as fast as memory is read.

    The bytes are laid out as a table of 64-bit words with 1024 columns; BLAKE2b of the
    sums of its rows and of its columns (both modulo 2^64), the rest of the bytes and
    their number is the digest. It finds bytes that were damaged, lost, mixed up or
    left over from another version, and is no protection against an adversary. It is
    the same on every device.

    Args:
        data: `[N]` uint8, without gaps.
        fill: Each step of it writes the next `piece_bytes()` of `data`, in a CPU's
            memory. They are read right after it, while a cache has them.

    Returns:
        16 hexadecimal digits.
    """
    steps = iter(()) if fill is None else fill
    # A view as 64-bit words needs an aligned start.
    if data.storage_offset() % 8:
        _take_all(steps)
        data = data.clone()
    num_bytes = data.numel()
    whole = num_bytes // _ROW_BYTES * _ROW_BYTES
    digest = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=8)
    if whole:
        # Integer sums wrap around without rounding, so every device gets the same
        # result in any order of addition.
        table = data[:whole].view(torch.int64).view(-1, _COLUMNS)
        for sums in _sums(table, steps):
            digest.update(sums.cpu().numpy().data)
    _take_all(steps)
    if whole < num_bytes:
        digest.update(data[whole:].cpu().numpy().data)
    return digest.hexdigest()


def _sums(
    table: torch.Tensor, steps: Iterator[object]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums of the rows and of the columns."""
    count = len(table)
    at_once = piece_bytes() // _ROW_BYTES if table.device.type == "cpu" else count
    # On a GPU this is always one step: there is no CPU cache to stay within.
    if count <= at_once:
        next(steps, None)
        return table.sum(1), table.sum(0)
    rows = table.new_empty(count)
    columns = table.new_empty(-(-count // at_once), _COLUMNS)
    for number, begin in enumerate(range(0, count, at_once)):
        next(steps, None)
        part = table[begin : begin + at_once]
        torch.sum(part, 0, out=columns[number])
        torch.sum(part, 1, out=rows[begin : begin + at_once])
    return rows, columns.sum(0)


def _take_all(steps: Iterator[object]) -> None:
    for _ in steps:
        pass
