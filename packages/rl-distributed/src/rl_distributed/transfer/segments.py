"""Files in memory that blocks travel in, one block after the other.

A page of memory costs far more when it is touched first than later, so a sender keeps
the files of blocks that are no longer in use, mapped, for the next ones.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_distributed.errors import ResourceInsufficientError
from rl_distributed.transfer.folder import map_file

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["MappedBlocks", "Segment", "Segments"]


@dataclass
class Segment:
    """One file, as its writer has it."""

    path: Path
    memory: torch.Tensor
    """All of it: `[N]` uint8."""
    message: int | None = None
    """The number of the message whose block is in it."""


class Segments:
    """The segments of one sender.

    Args:
        folder: Where the files are made.
        first: A number that no sender of the folder has used before.
        most: How many are kept; more exist only while messages need them.
    """

    def __init__(self, folder: Path, first: int, most: int) -> None:
        self._folder = folder
        self._next = first
        self._most = most
        self._all: list[Segment] = []  # the one that was used last comes last

    def take(self, num_bytes: int, is_done: Callable[[int], bool]) -> Segment:
        """Return a segment that has room and no readers.

        Args:
            num_bytes: Room that is needed.
            is_done: Whether the block of a message is no longer in use.

        Raises:
            ResourceInsufficientError: There is no memory for it.
        """
        for segment in self._all:
            if segment.message is not None and is_done(segment.message):
                segment.message = None
        fitting = [
            each
            for each in self._all
            if each.message is None and each.memory.numel() >= num_bytes
        ]
        if fitting:
            # The smallest that fits, to keep the large ones for large blocks.
            taken = min(fitting, key=lambda each: each.memory.numel())
            self._all.remove(taken)
        else:
            # Leave room for the segment that is about to be made.
            self._shrink(self._most - 1)
            taken = self._make(num_bytes)
        self._all.append(taken)
        return taken

    def _make(self, num_bytes: int) -> Segment:
        path = self._folder / f"block-{self._next:08d}"
        with path.open("w+b") as file:
            try:
                self._occupy(file.fileno(), num_bytes)
            except OSError as error:
                path.unlink()
                raise ResourceInsufficientError(
                    f"{self._folder.parent} has no room for a block of {num_bytes} "
                    f"bytes ({error.strerror}); send smaller buckets, allow fewer "
                    "blocks, or give the machine more shared memory"
                ) from error
            memory = mmap.mmap(file.fileno(), num_bytes)
        # Names are never reused, because receivers cache their mappings by name.
        self._next += 1
        return Segment(path, torch.frombuffer(memory, dtype=torch.uint8))

    def _occupy(self, file: int, num_bytes: int) -> None:
        """Reserve all memory now: running out of it on a write kills by SIGBUS."""
        try:
            os.posix_fallocate(file, 0, num_bytes)
        except OSError:
            # Unused segments are kept only to save time, so they can go first.
            self._shrink(0)
            os.posix_fallocate(file, 0, num_bytes)

    def _shrink(self, most: int) -> None:
        """Remove unused segments, longest unused first, until this many are left."""
        unused = [each for each in self._all if each.message is None]
        for segment in unused[: max(len(self._all) - most, 0)]:
            self._all.remove(segment)
            # Receivers' tensors keep the memory alive through their own mapping.
            segment.path.unlink(missing_ok=True)


class MappedBlocks:
    """Blocks in the segments of a folder, as a receiver has them.

    Args:
        folder: Where the segments are.
        held: Messages whose blocks earlier ends of the receiver may have for ever.
        is_private: Whether writes in place stay with the receiver.
    """

    def __init__(self, folder: Path, held: Iterable[int], is_private: bool) -> None:
        self._folder = folder
        self._is_private = is_private
        self._known: dict[str, mmap.mmap] = {}
        self._held: dict[int, weakref.ref[Any] | None] = dict.fromkeys(held)

    def open(self, message: int, name: str, num_bytes: int) -> torch.Tensor:
        """Return the block of a message: the first bytes of a segment."""
        array = np.frombuffer(self._memory(name), np.uint8)[:num_bytes]
        # Every tensor of the block holds this object, so it dies with the last of them.
        self._held[message] = weakref.ref(array)
        return torch.from_numpy(array)

    def held(self) -> tuple[int, ...]:
        """Return the messages of whose blocks there are tensors."""
        self._held = {
            message: array
            for message, array in self._held.items()
            if array is None or array() is not None
        }
        return tuple(self._held)

    def _memory(self, name: str) -> mmap.mmap:
        if self._is_private:
            # Mapped again for each block: once written to, a private page no longer
            # shows the file.
            return map_file(self._folder / name)
        if name not in self._known:
            for other in list(self._known):
                # The memory of a removed file is freed only with its last mapping.
                if not (self._folder / other).exists():
                    del self._known[other]
            self._known[name] = map_file(self._folder / name, is_private=False)
        return self._known[name]
