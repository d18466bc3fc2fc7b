"""Finished answers in the folder of a checkpoint.

```
asynchronous/answers.json           each answer as a tree; tensors are numbers of places
asynchronous/answers.safetensors    the tensors of all answers, end to end, by dtype
```
Only plain values are written: numbers, text, tensors, arrays, and lists, tuples and
dictionaries of them. An answer with anything else, such as an object of the environment
or the error that ended it, is left out and sampled again after a resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_algorithms.rollout.branches import Branch
from rl_algorithms.rollout.trajectories import PlayedRow, Trajectories, TrajectoryNotes
from rl_algorithms.trainers.ahead.jobs import FinishedAnswer
from rl_distributed.private_files import create_private_folder, write_private_text
from rl_envs.outcomes import ConversationOutcome

__all__ = ["read_answers", "write_answers"]

_FOLDER = "asynchronous"
_TREES, _TENSORS = "answers.json", "answers.safetensors"
_FORMAT = 1
_PLAIN = (str, int, float, bool, type(None))
_NAMES = ("prompt", "sample", "attempts", "oldest_version")
# Python refuses to write integers of more than 4,300 digits as text.
_MOST_BITS = 14_000
# Safetensors files have no such type.
_NO_FILE_TYPE = (torch.complex128,)


def write_answers(checkpoint: Path, answers: Mapping[int, FinishedAnswer]) -> set[int]:
    """Write answers into the folder of a checkpoint.

    Args:
        checkpoint: The folder.
        answers: Answers, by the task that sampled them.

    Returns:
        Tasks whose answers cannot be written as plain values, and are left out.
    """
    tensors, trees = _Tensors(), {}
    left_out = set()
    for rows, answer in answers.items():
        mark = tensors.mark()
        try:
            tree = _encode(_columns(answer.played.alone()), tensors)
        except TypeError:
            tensors.forget(mark)
            left_out.add(rows)
            continue
        trees[rows] = {name: getattr(answer, name) for name in _NAMES} | {"row": tree}
    if trees:
        folder = checkpoint / _FOLDER
        create_private_folder(folder)
        text = json.dumps({"format": _FORMAT, "answers": trees})
        write_private_text(folder / _TREES, text)
        save_file(tensors.joined(), folder / _TENSORS)
    return left_out


def read_answers(checkpoint: Path) -> dict[int, FinishedAnswer]:
    """Return the answers in a checkpoint, by the task that sampled them.

    A checkpoint of a run that was not asynchronous, or of a release that wrote none,
    has no answers.
    """
    folder = checkpoint / _FOLDER
    if not (folder / _TREES).exists():
        return {}
    saved = json.loads((folder / _TREES).read_text(encoding="utf-8"))
    if saved["format"] != _FORMAT:
        # They are sampled again, as by a release that wrote none.
        return {}
    tensors = load_file(folder / _TENSORS)
    return {
        int(rows): FinishedAnswer(
            **{name: tree[name] for name in _NAMES},
            played=PlayedRow(_trajectories(_decode(tree["row"], tensors))),
        )
        for rows, tree in saved["answers"].items()
    }


def _columns(played: Trajectories) -> dict[str, Any]:
    """Return all fields of a row, those of its notes under their own name."""
    columns = {field.name: getattr(played, field.name) for field in fields(played)}
    notes = played.notes
    columns["notes"] = {
        field.name: getattr(notes, field.name) for field in fields(notes)
    }
    return columns


def _trajectories(columns: dict[str, Any]) -> Trajectories:
    notes = TrajectoryNotes(**columns.pop("notes"))
    return Trajectories(**columns, notes=notes)


class _Tensors:
    """Tensors end to end, one list for each dtype: thousands of small ones are slow."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, Tensor]] = []
        self._sizes: dict[str, int] = {}

    def add(self, tensor: Tensor) -> list[Any]:
        """Append a tensor, and return its place: dtype, offset and shape."""
        name = str(tensor.dtype).removeprefix("torch.")
        offset = self._sizes.get(name, 0)
        self._parts.append((name, tensor.reshape(-1)))
        self._sizes[name] = offset + tensor.numel()
        return [name, offset, list(tensor.shape)]

    def mark(self) -> tuple[int, dict[str, int]]:
        """Return the present end."""
        return len(self._parts), dict(self._sizes)

    def forget(self, mark: tuple[int, dict[str, int]]) -> None:
        """Remove what was appended since a mark."""
        count, self._sizes = mark
        del self._parts[count:]

    def joined(self) -> dict[str, Tensor]:
        """Return one tensor for each dtype."""
        return {
            name: torch.cat([part for of, part in self._parts if of == name])
            for name in self._sizes
        }


def _encode(value: Any, tensors: _Tensors) -> Any:
    """Return a value as JSON; what is no list stands under a key that names its kind.

    Raises:
        TypeError: The value is not plain.
    """
    # Not by `isinstance`: a subclass, such as an enumeration, would come back changed.
    kind = type(value)
    if kind is int and value.bit_length() > _MOST_BITS:
        raise TypeError("an integer is too long for a file")
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encode(item, tensors) for item in value]
    if kind is tuple:
        return {"tuple": [_encode(item, tensors) for item in value]}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encode(item, tensors) for key, item in value.items()}}
    if (
        kind is Tensor
        and value.layout is torch.strided
        and value.dtype not in _NO_FILE_TYPE
    ):
        return {"tensor": tensors.add(value.detach().cpu())}
    # An array in the other byte order, as read from a file, cannot become a tensor.
    if kind is np.ndarray and value.dtype.kind in "biuf" and value.dtype.isnative:
        # Not `ascontiguousarray`, which gives a single value a dimension.
        array = np.asarray(value, order="C")
        return {"array": tensors.add(torch.from_numpy(array))}
    if kind is ConversationOutcome:
        return {"outcome": value.value}
    if kind is Branch:
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"branch": _encode(parts, tensors)}
    raise TypeError(f"{kind.__name__} is no plain value")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in held)
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in held.items()}
    if kind == "outcome":
        return ConversationOutcome(held)
    if kind == "branch":
        return Branch(**_decode(held, tensors))
    name, offset, shape = held
    size = int(np.prod(shape, dtype=np.int64))
    # A clone: a view would keep the tensors of all answers as long as one is held.
    found = tensors[name][offset : offset + size].reshape(shape).clone()
    return found.numpy() if kind == "array" else found
