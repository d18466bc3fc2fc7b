"""Weights on their way to an engine in another process: a file in shared memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from rl_models.errors import WeightSyncError

__all__ = ["WeightFile"]

_MEMORY = Path("/dev/shm")
_ALIGNMENT = 64


class WeightFile:
    """Writes tensors one after the other into a file, removed when the context ends.

    vLLM pickles the arguments of its RPCs. With a file, only a path has to travel.

    Args:
        tensors: Names and values; errors of the iterator are passed on and leave no
            file behind.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._entries: list[tuple[str, str, list[int], int]] = []
        self._file: Any = None

    @property
    def arguments(self) -> tuple[str, list[tuple[str, str, list[int], int]]]:
        """Arguments of `WeightExtension.rl_load_file`."""
        return self._file.name, self._entries

    def __enter__(self) -> WeightFile:
        folder = _MEMORY if _MEMORY.is_dir() else None
        # Only this user can read files that tempfile makes.
        self._file = tempfile.NamedTemporaryFile(prefix="rl-weights-", dir=folder)
        try:
            for name, tensor in self._tensors:
                self._write(name, tensor)
            self._file.flush()
        except OSError as error:
            self._file.close()
            raise WeightSyncError(
                f"The weights have no room in {self._file.name}: {error}"
            ) from error
        # `__exit__` is not called when `__enter__` raises.
        except BaseException:
            self._file.close()
            raise
        return self

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        start = -(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT
        self._file.seek(start)
        flat = tensor.detach().cpu().contiguous().view(-1)
        # As bytes, because numpy has no bfloat16.
        self._file.write(flat.view(torch.uint8).numpy().data)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._entries.append((name, dtype, list(tensor.shape), start))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
