"""What was sent: names, shapes, dtypes and digests of tensors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = [
    "ROW_BYTES",
    "Digest",
    "Manifest",
    "TensorEntry",
    "digest_of",
    "dtype_name",
]

_COLUMNS = 1024
ROW_BYTES = 8 * _COLUMNS
"""Digests are made of pieces of so many bytes."""
# Both sums of a part are made while it lies in a cache of the CPU. Where torch has
# several threads, it shares larger parts out to them, which costs more than it takes.
_ROWS_AT_ONCE = 62
_ROWS_FOR_ONE_THREAD = 31


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a transfer."""

    name: str
    dtype: str
    """Name of the torch dtype, such as `float32`."""
    shape: tuple[int, ...]
    digest: str
    """`digest_of` its bytes."""
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
        """The opposite of `to_json`."""
        name, dtype, shape, digest, start = value
        return cls(name, dtype, tuple(shape), digest, start)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of a transfer, in the order in which they were sent."""

    entries: tuple[TensorEntry, ...]
    label: str = ""
    """What the sender called the transfer, such as a version."""

    @property
    def digest(self) -> str:
        """One digest of names, shapes, dtypes, digests and the label.

        Equal where the same tensors were sent and received, in any order.
        """
        entries = sorted(entry.to_json()[:-1] for entry in self.entries)
        text = json.dumps([self.label, entries])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries)

    def differences(self, received: Manifest) -> list[str]:
        """What is missing, extra or other in `received`, in words; empty if equal."""
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
    """The name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


class Digest:
    """Makes the digest of bytes that come in pieces; `digest_of` says what it is."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._rows: list[torch.Tensor] = []
        self._columns: torch.Tensor | None = None
        self._rest = b""

    def update(self, data: torch.Tensor) -> None:
        """Add `[N]` uint8 without gaps; the last piece alone may end within a row."""
        if self._num_bytes % ROW_BYTES:
            raise ValueError(
                f"only the last piece may be no multiple of {ROW_BYTES} bytes: "
                f"{self._num_bytes} came before one of {data.numel()}"
            )
        self._num_bytes += data.numel()
        whole = data.numel() // ROW_BYTES * ROW_BYTES
        if whole:
            self._add(data[:whole])
        if whole < data.numel():
            self._rest = data[whole:].cpu().numpy().tobytes()

    def hexdigest(self) -> str:
        """The digest of all pieces."""
        digest = hashlib.blake2b(self._num_bytes.to_bytes(8, "little"), digest_size=8)
        if self._columns is not None:
            digest.update(torch.cat(self._rows).cpu().numpy().data)
            digest.update(self._columns.cpu().numpy().data)
        digest.update(self._rest)
        return digest.hexdigest()

    def _add(self, words: torch.Tensor) -> None:
        if words.storage_offset() % 8:
            words = words.clone()
        table = words.view(torch.int64).view(-1, _COLUMNS)
        parts = torch.split(table, _rows_at_once(table))
        if self._columns is None:
            self._columns = table.new_zeros(_COLUMNS)
        for part in parts:
            self._columns += part.sum(0)
            self._rows.append(part.sum(1))


def digest_of(data: torch.Tensor) -> str:
    """A digest of bytes that is made about as fast as memory is read.

    The bytes are laid out as a table of 64-bit words with 1024 columns; BLAKE2b of the
    sums of its rows and of its columns (both modulo 2^64), the rest of the bytes and
    their number is the digest. It finds bytes that were damaged, lost, mixed up or
    left over from another version, and is no protection against an adversary. It is
    the same on every device.

    Args:
        data: `[N]` uint8, without gaps.

    Returns:
        16 hexadecimal digits.
    """
    digest = Digest()
    digest.update(data)
    return digest.hexdigest()


def _rows_at_once(table: torch.Tensor) -> int:
    if table.device.type != "cpu":
        return len(table)
    return _ROWS_AT_ONCE if torch.get_num_threads() == 1 else _ROWS_FOR_ONE_THREAD
