"""Compare the tensors of two folders, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_distributed.errors import CheckpointError
from rl_models.checkpoint.sharded import ShardedReader

__all__ = ["TensorComparison", "TensorDifference", "compare_tensors"]

_BLOCK = 1 << 22
"""Maximum number of elements in memory at once, of each side."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs."""

    name: str
    first: str
    """Data type and shape; `absent`: the folder lacks the tensor."""
    second: str
    num_elements: int = 0
    """Number of elements that differ; 0 if type or shape differ."""
    largest: float | None = None
    """Largest absolute difference; None if type or shape differ."""


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """The tensors of two folders."""

    num_tensors: int
    differences: tuple[TensorDifference, ...]
    """Tensors that differ, by name."""
    left_out: tuple[str, ...] = ()
    """Tensors that cannot be compared, since ranks keep their own."""


def compare_tensors(
    first: Path, second: Path, *, tolerance: float = 0.0
) -> TensorComparison:
    """Compare all safetensors of two folders by name.

    Training states that the same number of ranks wrote in the same layout are compared
    part by part; in other layouts, one whole tensor of each is in memory.

    Args:
        first: Folder of a model or of a training state.
        second: The other one.
        tolerance: Largest difference of two elements that counts as none, relative to
            the larger of them; absolute if both are below 1. 0: bitwise.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    try:
        are_states = all((f / "state.json").is_file() for f in (first, second))
        if are_states and _layout(first) != _layout(second):
            return _compare_states(first, second, tolerance)
        return _compare_files(first, second, tolerance)
    except (OSError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"the tensors in {first} and {second} cannot be compared: {error}; compare "
            "another step"
        ) from error


def _layout(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("rank_*.json")}


def _compare_files(first: Path, second: Path, tolerance: float) -> TensorComparison:
    a, b = _places(first), _places(second)
    found = []
    for key in sorted(a.keys() | b.keys()):
        name = f"{key[0]} ({key[1]})" if key[1] else key[0]
        if key not in a or key not in b:
            shown = ["present" if key in each else "absent" for each in (a, b)]
            found.append(TensorDifference(name, shown[0], shown[1]))
            continue
        with (
            safe_open(a[key], framework="pt") as file_a,
            safe_open(b[key], framework="pt") as file_b,
        ):
            difference = _compare_in_files(name, key[0], file_a, file_b, tolerance)
        if difference is not None:
            found.append(difference)
    return TensorComparison(len(a.keys() | b.keys()), tuple(found))


def _places(folder: Path) -> dict[tuple[str, str], Path]:
    """Return the file of each tensor, by its name and, if a rank wrote it, the rank."""
    places: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        rank = path.stem if path.stem.startswith("rank_") else ""
        with safe_open(path, framework="pt") as tensors:
            places |= {(name, rank): path for name in tensors.keys()}  # noqa: SIM118
    return places


def _compare_in_files(
    name: str, key: str, first: Any, second: Any, tolerance: float
) -> TensorDifference | None:
    slices = [file.get_slice(key) for file in (first, second)]
    shapes = [tuple(each.get_shape()) for each in slices]
    kinds = [f"{each.get_dtype()} {list(each.get_shape())}" for each in slices]
    if kinds[0] != kinds[1]:
        return TensorDifference(name, kinds[0], kinds[1])
    if not shapes[0]:
        blocks = iter([(first.get_tensor(key), second.get_tensor(key))])
    else:
        blocks = (
            (slices[0][start:stop], slices[1][start:stop])
            for start, stop in _rows(shapes[0])
        )
    return _compare_blocks(name, kinds[0], blocks, tolerance)


def _rows(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    width = max(torch.Size(shape[1:]).numel(), 1)
    height = max(_BLOCK // width, 1)
    return pairwise([*range(0, shape[0], height), shape[0]])


def _compare_blocks(
    name: str, kind: str, blocks: Iterator[tuple[Tensor, Tensor]], tolerance: float
) -> TensorDifference | None:
    num_elements, largest = 0, 0.0
    for a, b in blocks:
        a, b = a.contiguous().flatten(), b.contiguous().flatten()
        bits = _BITS.get(a.element_size(), torch.uint8)
        differs = a.view(bits) != b.view(bits)
        if not bool(differs.any()):
            continue
        # A NaN on one side only is as far away as can be.
        x, y = a[differs].double(), b[differs].double()
        distance = (x - y).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        if tolerance:
            scale = torch.maximum(x.abs(), y.abs()).clamp(min=1.0)
            # Beside an infinite number, every distance would be within the tolerance.
            is_near = (distance <= tolerance * scale) & distance.isfinite()
            distance = distance[~is_near]
        if distance.numel():
            num_elements += distance.numel()
            largest = max(largest, float(distance.max()))
    if not num_elements:
        return None
    return TensorDifference(name, kind, kind, num_elements, largest)


def _compare_states(first: Path, second: Path, tolerance: float) -> TensorComparison:
    a, b = ShardedReader(first), ShardedReader(second)
    names = sorted(a.names() | b.names())
    # The random state belongs to a rank, and the ranks are others.
    left_out = tuple(name for name in names if name.startswith("random/"))
    found = []
    for name in [name for name in names if name not in left_out]:
        if name not in a.names() or name not in b.names():
            shown = ["present" if name in r.names() else "absent" for r in (a, b)]
            found.append(TensorDifference(name, shown[0], shown[1]))
            continue
        x, y = _whole(a, name), _whole(b, name)
        kinds = [f"{each.dtype} {list(each.shape)}" for each in (x, y)]
        if kinds[0] != kinds[1]:
            found.append(TensorDifference(name, kinds[0], kinds[1]))
            continue
        blocks = zip(
            torch.split(x.flatten(), _BLOCK),
            torch.split(y.flatten(), _BLOCK),
            strict=True,
        )
        difference = _compare_blocks(name, kinds[0], blocks, tolerance)
        if difference is not None:
            found.append(difference)
    return TensorComparison(len(names) - len(left_out), tuple(found), left_out)


def _whole(reader: ShardedReader, name: str) -> Tensor:
    parts = (reader.on_rank(name, rank) for rank in range(reader.world_size))
    dtype = next(part.dtype for part in parts if part is not None)
    value = torch.empty(reader.shape(name), dtype=dtype)
    reader.read_into(name, value)
    return value
