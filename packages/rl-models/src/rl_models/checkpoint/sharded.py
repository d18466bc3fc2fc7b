"""Exact training state in safetensors and JSON, loadable at another number of ranks.

```
<folder>/state.json                      what is the same on all ranks
         rank_00000_of_00002.safetensors   this rank's rows of every tensor
         rank_00000_of_00002.json          where those rows belong
```
Every tensor is split along dimension 0 or whole on each rank. The index of a rank
gives, for each of its tensors, the global shape and the first row. A reader takes the
rows that it needs from whichever files hold them, so values are bitwise the same at any
number of ranks. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_distributed.errors import CheckpointError

__all__ = ["Shard", "ShardedReader", "write_shards", "write_state"]

_FORMAT = "rl-models-sharded-1"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows `[first_row, first_row + len(tensor))` of a global tensor."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    global_shape: list[int]
    first_row: int
    num_rows: int


def _file_name(rank: int, world_size: int, suffix: str) -> str:
    return f"rank_{rank:05d}_of_{world_size:05d}.{suffix}"


def write_shards(
    folder: Path, shards: Mapping[str, Shard], rank: int, world_size: int
) -> None:
    """Write this rank's tensors and their index.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written.
    """
    index = {
        name: asdict(
            _Place(
                list(shard.global_shape),
                shard.first_row,
                shard.tensor.shape[0] if shard.tensor.ndim else 1,
            )
        )
        for name, shard in shards.items()
    }
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
    """Write what is the same on all ranks; one rank calls it.

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
    """Reads tensors of a folder by global rows.

    Raises:
        CheckpointError: A file is missing or damaged, or the format is another.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        record = self._read_json("state.json")
        if record.get("format") != _FORMAT:
            raise CheckpointError(
                f"{self.folder} has format {record.get('format')!r}; this version "
                f"reads {_FORMAT!r}"
            )
        self.world_size = int(record["world_size"])
        self.state: dict[str, Any] = record["state"]
        self._files: list[Any] = []
        self._places: list[dict[str, _Place]] = []
        for rank in range(self.world_size):
            index = self._read_json(_file_name(rank, self.world_size, "json"))
            self._places.append({name: _Place(**at) for name, at in index.items()})
            path = self.folder / _file_name(rank, self.world_size, "safetensors")
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
        return {name for places in self._places for name in places}

    def on_rank(self, name: str, rank: int) -> Tensor | None:
        """Read a tensor as one rank wrote it; None if that rank has none."""
        if rank >= self.world_size or name not in self._places[rank]:
            return None
        tensor: Tensor = self._files[rank].get_tensor(name)
        return tensor

    def read_into(self, name: str, target: Tensor, first_row: int = 0) -> None:
        """Fill `target` with the global rows from `first_row` on.

        Raises:
            CheckpointError: The tensor is missing, has another shape, or has gaps.
        """
        found = [rank for rank, p in enumerate(self._places) if name in p]
        if not found:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}")
        place = self._places[found[0]][name]
        if list(target.shape[1:]) != place.global_shape[1:]:
            raise CheckpointError(
                f"{name!r} in {self.folder} has shape {place.global_shape}, which does "
                f"not fit rows of shape {list(target.shape[1:])}"
            )
        if target.ndim == 0:
            target.copy_(self._files[found[0]].get_tensor(name))
            return
        missing = target.shape[0]
        for rank in found:
            missing -= self._copy_rows(rank, name, target, first_row)
            if missing == 0:
                return
        raise CheckpointError(
            f"{name!r} in {self.folder} lacks {missing} of the rows "
            f"{first_row} to {first_row + target.shape[0]}"
        )

    def _copy_rows(self, rank: int, name: str, target: Tensor, first_row: int) -> int:
        place = self._places[rank][name]
        low = max(first_row, place.first_row)
        high = min(first_row + target.shape[0], place.first_row + place.num_rows)
        if high <= low:
            return 0
        part = self._files[rank].get_slice(name)
        rows = part[low - place.first_row : high - place.first_row]
        with torch.no_grad():
            target[low - first_row : high - first_row].copy_(rows)
        return high - low
