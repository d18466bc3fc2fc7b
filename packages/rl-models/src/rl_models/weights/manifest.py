"""A version of a model's weights as flat buffers with a manifest that proves them.

`WeightBundle` is what travels from a trainer to the generators. Its tensors lie end to
end in one numpy array per data type, so that Ray moves it without copying; each has an
entry with name, shape, data type, place and digest. The digest is the CRC-32 of the
tensor's bytes: it finds bytes that were damaged, mixed up or left over from another
version, at about a gigabyte per second; it is no protection against an adversary.
"""

from __future__ import annotations

import hashlib
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rl_models.errors import WeightSyncError

__all__ = ["TensorEntry", "WeightBundle"]

# Types that numpy lacks travel as integers of the same width.
_CARRIERS: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a bundle."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the torch data type, such as "float32"; also the buffer it lies in."""
    start: int
    """Index of its first element in that buffer."""
    digest: int
    """CRC-32 of its bytes."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class WeightBundle:
    """All weights of one version."""

    version: int | None
    """What the trainer calls these weights; None leaves it to the synchroniser."""
    entries: tuple[TensorEntry, ...]
    buffers: dict[str, npt.NDArray[np.generic]]
    """One flat array per data type."""

    @classmethod
    def pack(
        cls,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int | None = None,
    ) -> WeightBundle:
        """Copy tensors (of any device) into a bundle."""
        tensors = {name: tensor.detach() for name, tensor in named_tensors}
        sizes: dict[str, int] = {}
        for tensor in tensors.values():
            key = _dtype_name(tensor.dtype)
            sizes[key] = sizes.get(key, 0) + tensor.numel()
        flat = {
            key: torch.empty(size, dtype=_carrier(getattr(torch, key)))
            for key, size in sizes.items()
        }
        cursor = dict.fromkeys(sizes, 0)
        entries = []
        for name, tensor in tensors.items():
            key = _dtype_name(tensor.dtype)
            start, stop = cursor[key], cursor[key] + tensor.numel()
            cursor[key] = stop
            place = flat[key][start:stop]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            digest = zlib.crc32(place.numpy().data)
            entries.append(TensorEntry(name, tuple(tensor.shape), key, start, digest))
        buffers = {key: buffer.numpy() for key, buffer in flat.items()}
        return cls(version, tuple(entries), buffers)

    @property
    def digest(self) -> str:
        """Digest of the manifest: names, shapes, types, digests and the version."""
        text = repr((self.version, self.entries))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def verify(self, receiver: str = "the receiver") -> None:
        """Compare every tensor with its digest.

        Args:
            receiver: Who checks; named in the error.

        Raises:
            WeightSyncError: Tensors differ from what was packed; they are named.
        """
        bad = [entry.name for entry in self.entries if not self._is_whole(entry)]
        if bad:
            shown = ", ".join(bad[:5]) + (", ..." if len(bad) > 5 else "")
            raise WeightSyncError(
                f"Weights{self._label} arrived damaged at {receiver}: "
                f"{len(bad)} of {len(self.entries)} tensors do not match their "
                f"digest ({shown}). Nothing was loaded; send them again."
            )

    @property
    def _label(self) -> str:
        return "" if self.version is None else f" of version {self.version}"

    def _is_whole(self, entry: TensorEntry) -> bool:
        buffer = self.buffers.get(entry.dtype)
        if buffer is None or buffer.size < entry.start + entry.size:
            return False
        part = buffer[entry.start : entry.start + entry.size]
        return zlib.crc32(part.data) == entry.digest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of each tensor; the values share the bundle's memory.

        Arrays out of Ray's object store are read-only: copy before you write.
        """
        flat = {key: _readable(buffer) for key, buffer in self.buffers.items()}
        for entry in self.entries:
            part = flat[entry.dtype][entry.start : entry.start + entry.size]
            dtype: torch.dtype = getattr(torch, entry.dtype)
            yield entry.name, part.view(dtype).view(entry.shape)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _carrier(dtype: torch.dtype) -> torch.dtype:
    return _CARRIERS.get(dtype, dtype)


def _readable(buffer: npt.NDArray[np.generic]) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch warns that a read-only array could be written; nobody writes it here.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(buffer)
