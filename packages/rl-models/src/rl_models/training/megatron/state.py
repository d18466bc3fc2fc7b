"""Training state for an exact resume, under Hugging Face's names and shapes.

The folder is that of the `dtensor` backend, and either backend resumes from the
other's, in any layout: optimizer state is elementwise, so it is split and joined as the
weights are. Each rank writes and reads its own part of every tensor, and no rank has
the whole model. Ranks with the same part write it once.

Megatron-core's `dist_checkpointing` is not used: it writes Megatron-core's names and
shapes, which only Megatron-core could read.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rl_distributed.errors import CheckpointError
from rl_models.checkpoint.sharded import Box
from rl_models.training.dtensor.state import load_training_state, save_training_state
from rl_models.training.megatron.conversion import Entry
from rl_models.training.megatron.model import MegatronModel
from rl_models.training.process_group import Ranks

__all__ = ["load_state", "save_state"]


class _Parts:
    """This rank's parts of Hugging Face's tensors, as the training state has them."""

    def __init__(self, model: MegatronModel, ranks: Ranks) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.ranks = ranks
        self._model = model
        self._boxes: dict[str, Box] = {}
        self._entries: dict[str, Entry] = {}

    def add(self, entry: Entry, parts: list[Tensor]) -> list[nn.Parameter]:
        """Take this rank's parts of a parameter."""
        added = []
        boxes = self._model.boxes(entry)
        for source, part, box in zip(entry.sources, parts, boxes, strict=True):
            parameter = nn.Parameter(part, requires_grad=False)
            self.parameters[source] = parameter
            self._boxes[source], self._entries[source] = box, entry
            added.append(parameter)
        return added

    def writes(self, name: str) -> bool:
        """Return whether this is the first of the ranks with this part."""
        entry, layout = self._entries[name], self._model.layout
        if entry.kind == "whole" and layout.tensor_rank:
            return False
        of_experts = entry.is_of_experts
        return (
            layout.num_alike(of_experts=of_experts) == 1
            or layout.alike(of_experts=of_experts).rank() == 0
        )

    def expected_in(self, saved: Set[str]) -> Set[str]:
        """Return the parameters of all stages: none is frozen."""
        return set(self._model.shapes)

    def box(self, name: str) -> Box:
        """Return which part of the whole parameter this rank has."""
        return self._boxes[name]

    def of_all_stages(
        self, scalars: dict[str, dict[str, float]]
    ) -> dict[str, dict[str, float]]:
        """Return numbers by parameter, those of other stages too; collective."""
        layout = self._model.layout
        merged: dict[str, dict[str, float]] = {}
        for stage in range(layout.num_stages):
            merged |= layout.object_from_stage(scalars, stage)
        return merged

    def free_gathered(self) -> None:
        """Do nothing: no weights are gathered."""


class _StateOfParts:
    """Optimizer state by part, with the settings of another optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self.state: dict[Tensor, dict[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the settings; the state is read from `state`."""
        return {"param_groups": self.param_groups}


def save_state(
    folder: Path,
    model: MegatronModel,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    ranks: Ranks,
) -> None:
    """Write the training state; collective on all ranks.

    Raises:
        CheckpointError: The optimizer keeps state that is not elementwise.
    """
    parts, state = _Parts(model, ranks), _StateOfParts(optimizer)
    for entry in model.entries.values():
        if not model.has(entry):
            continue
        name, masters = entry.name, model.masters
        added = parts.add(entry, model.parts(entry, masters.whole(name).detach()))
        own = masters.parameters[name]
        for key, value in optimizer.state.get(own, {}).items():
            if value is None:
                continue
            pieces: list[Any] = [value] * len(added)
            if isinstance(value, Tensor) and value.ndim:
                _check_shape(value, own, key, name)
                # The same order on all ranks, because each of these is a collective
                # where ranks share the state.
                pieces = model.parts(entry, masters.whole(name, value))
            for parameter, piece in zip(added, pieces, strict=True):
                state.state.setdefault(parameter, {})[key] = piece
    save_training_state(folder, parts, cast(Optimizer, state), scheduler)


def load_state(
    folder: Path,
    model: MegatronModel,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    ranks: Ranks,
) -> None:
    """Restore a state of `save_state` or the `dtensor` backend, in any layout.

    Raises:
        CheckpointError: The folder is damaged or belongs to another model.
    """
    parts, state = _Parts(model, ranks), _StateOfParts(optimizer)
    masters = model.masters
    held: dict[str, list[nn.Parameter]] = {}
    for name in masters.parameters:
        entry = model.entry(name)
        if entry.sources[0] not in parts.parameters:
            boxes = model.boxes(entry)
            parts.add(
                entry,
                [torch.zeros(box.sizes, device=model.layout.device) for box in boxes],
            )
        held[name] = [parts.parameters[source] for source in entry.sources]
    load_training_state(folder, parts, cast(Optimizer, state), scheduler)
    for name, own in masters.parameters.items():
        masters.assign(name, model.joined(name, [p.detach() for p in held[name]]))
        states = [state.state.get(part, {}) for part in held[name]]
        restored: dict[str, Any] = {}
        for key, first in states[0].items():
            restored[key] = first
            if isinstance(first, Tensor) and first.ndim:
                if first.shape != held[name][0].shape:
                    raise CheckpointError(
                        f"the training state in {folder} has {key} of shape "
                        f"{tuple(first.shape)} for {name}, and the training backend "
                        "'megatron' reads state of the parameter's shape only; resume "
                        "with the backend dtensor"
                    )
                joined = model.joined(name, [each[key] for each in states])
                # A copy: it may be a view of a tensor with other ranks' numbers.
                mine = masters.own_slice(name, joined).to(own.device)
                restored[key] = mine.clone(memory_format=torch.contiguous_format)
        if restored:
            optimizer.state[own] = restored


def _check_shape(value: Tensor, own: Tensor, key: str, name: str) -> None:
    if value.shape != own.shape:
        raise CheckpointError(
            f"the training state cannot be written: the optimizer keeps {key} of "
            f"shape {tuple(value.shape)} for {name}, and the training backend "
            "'megatron' writes state of the parameter's shape only; use AdamW or SGD"
        )
