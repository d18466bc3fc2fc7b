"""Exact training state in safetensors and JSON, loadable at another number of ranks.

```
<folder>/state.json                      state common to all ranks
         rank_00000_of_00002.safetensors   this rank's part of every tensor
         rank_00000_of_00002.json          positions of those parts
```
A part is a box: it begins somewhere in each dimension of the whole tensor and has a
size there. The index of a rank gives, for each of its tensors, the whole shape and the
box; no two ranks write the same part. A reader takes what it needs from whichever files
hold it, so values are bitwise the same in any layout of the ranks. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_distributed.errors import CheckpointError

__all__ = ["Shard", "ShardedReader", "write_shards", "write_state"]

_FORMAT = "rl-models-sharded-2"
_ROWS_FORMAT = "rl-models-sharded-1"
"""The previous format: parts were rows, `first_row` and `num_rows`."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a whole tensor."""

    global_shape: tuple[int, ...]
    starts: tuple[int, ...]
    """Its start in each dimension."""
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the part in the whole tensor."""
        pairs = zip(self.starts, self.sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in pairs)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def meet(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of a tensor; None if it is empty."""
        starts, sizes = [], []
        for a, n, b, m in zip(
            self.starts, self.sizes, other.starts, other.sizes, strict=True
        ):
            start = max(a, b)
            size = min(a + n, b + m) - start
            if size <= 0:
                return None
            starts.append(start)
            sizes.append(size)
        return Box(self.global_shape, tuple(starts), tuple(sizes))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this part in a tensor that holds the part `outer`."""
        return tuple(
            slice(start - first, start - first + size)
            for start, first, size in zip(
                self.starts, outer.starts, self.sizes, strict=True
            )
        )

    @classmethod
    def from_index(cls, entry: Mapping[str, Any]) -> Box:
        """Read an entry of a rank's index, in this format or the previous one."""
        shape = tuple(entry["global_shape"])
        if "first_row" not in entry:
            return cls(shape, tuple(entry["starts"]), tuple(entry["sizes"]))
        if not shape:
            return cls.whole(shape)
        starts = (int(entry["first_row"]), *(0 for _ in shape[1:]))
        return cls(shape, starts, (int(entry["num_rows"]), *shape[1:]))


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a tensor, and its position."""

    tensor: Tensor
    box: Box


def _file_name(rank: int, world_size: int, suffix: str) -> str:
    return f"rank_{rank:05d}_of_{world_size:05d}.{suffix}"


def write_shards(
    folder: Path, shards: Mapping[str, Shard], rank: int, world_size: int
) -> None:
    """Write this rank's tensors and their index.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written.
    """
    # A box has its own index, so ranks need not talk to each other when they write.
    index = {name: asdict(shard.box) for name, shard in shards.items()}
    tensors = {
        name: shard.tensor.detach().cpu().contiguous() for name, shard in shards.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / _file_name(rank, world_size, "safetensors"))
        text = json.dumps(index, indent=1)
        (folder / _file_name(rank, world_size, "json")).write_text(text, "utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the training state of rank {rank} to {folder}: {error}; "
            "free disk space or choose another checkpoint_dir"
        ) from error


def write_state(folder: Path, state: Mapping[str, Any], world_size: int) -> None:
    """Write the state common to all ranks; called on one rank.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written.
    """
    record = {"format": _FORMAT, "world_size": world_size, "state": dict(state)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(json.dumps(record, indent=1), "utf-8")
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder / 'state.json'}: {error}"
        ) from error


class ShardedReader:
    """Reads parts of the tensors of a folder.

    Raises:
        CheckpointError: A file is missing or damaged, or the format is another.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        record = self._read_json("state.json")
        if record.get("format") not in (_FORMAT, _ROWS_FORMAT):
            raise CheckpointError(
                f"{self.folder} has format {record.get('format')!r}; this version "
                f"reads {_FORMAT!r}"
            )
        self.format: str = record["format"]
        self.world_size = int(record["world_size"])
        self.state: dict[str, Any] = record["state"]
        self._files: list[Any] = []
        self._boxes: list[dict[str, Box]] = []
        for rank in range(self.world_size):
            index = self._read_json(_file_name(rank, self.world_size, "json"))
            self._boxes.append({name: Box.from_index(at) for name, at in index.items()})
            path = self.folder / _file_name(rank, self.world_size, "safetensors")
            # Mapped and not read: each tensor, or a part of it, is read on request.
            try:
                self._files.append(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path} is missing or damaged: {error}; resume from an older "
                    "checkpoint"
                ) from error

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is missing or damaged: {error}; resume from an older "
                "checkpoint"
            ) from error
        return data

    def names(self) -> set[str]:
        """Names of all tensors."""
        return {name for boxes in self._boxes for name in boxes}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return next(boxes[name].global_shape for boxes in self._boxes if name in boxes)

    def lacks(self, name: str) -> bool:
        """Return whether a part of a tensor is missing on all ranks."""
        if name.startswith("random/"):
            return False  # each rank's own
        held = sum(boxes[name].numel for boxes in self._boxes if name in boxes)
        return held < math.prod(self.shape(name))

    def on_rank(self, name: str, rank: int) -> Tensor | None:
        """Read a tensor as one rank wrote it; None if that rank has none."""
        if rank >= self.world_size or name not in self._boxes[rank]:
            return None
        tensor: Tensor = self._files[rank].get_tensor(name)
        return tensor

    def read_into(self, name: str, target: Tensor, box: Box | None = None) -> None:
        """Fill `target` with a part of a tensor.

        Args:
            name: Name of the tensor.
            target: Tensor of the part's size.
            box: The part; None: the whole tensor.

        Raises:
            CheckpointError: The tensor is missing, has another shape, or has gaps.
        """
        box = Box.whole(tuple(target.shape)) if box is None else box
        found = [rank for rank, boxes in enumerate(self._boxes) if name in boxes]
        if not found:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}")
        saved = self._boxes[found[0]][name].global_shape
        if saved != box.global_shape:
            raise CheckpointError(
                f"{name!r} in {self.folder} has shape {list(saved)}, and shape "
                f"{list(box.global_shape)} is needed"
            )
        if not box.sizes:
            found = found[:1]  # a number is the same on all ranks
        missing = box.numel
        for rank in found:
            held = self._boxes[rank][name]
            part = held.meet(box)
            if part is None:
                continue
            with torch.no_grad():
                target[part.within(box)].copy_(self._read(rank, name, held, part))
            missing -= part.numel
        # No two ranks write the same part, so the sizes of the pieces add up exactly.
        if missing:
            raise CheckpointError(
                f"{name!r} in {self.folder} lacks {missing} of the {box.numel} numbers "
                f"from {list(box.starts)} on"
            )

    def _read(self, rank: int, name: str, held: Box, part: Box) -> Tensor:
        if not part.sizes:
            tensor: Tensor = self._files[rank].get_tensor(name)
            return tensor
        rows: Tensor = self._files[rank].get_slice(name)[part.within(held)]
        return rows
