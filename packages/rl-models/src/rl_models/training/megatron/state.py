"""Training state for an exact resume, under Hugging Face's names and shapes.

The folder is that of the `dtensor` backend, and either backend resumes from the
other's: optimizer state is elementwise, so it is split and joined as the weights are.
Rank 0 writes the tensors, and every rank reads all of them; random numbers are per
rank.
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
from rl_models.training.megatron.model import MegatronModel
from rl_models.training.process_group import Ranks

__all__ = ["load_state", "save_state"]


class _WholeModel:
    """Whole parameters, in the form that the training state expects of a model."""

    def __init__(self, parameters: dict[str, nn.Parameter], ranks: Ranks) -> None:
        self.parameters = parameters
        self.ranks = ranks

    def writes(self, name: str) -> bool:
        """Return whether the parameter is here: each rank writes what it has."""
        return name in self.parameters

    def expected_in(self, saved: Set[str]) -> Set[str]:
        """Return all parameters: none is frozen."""
        return set(self.parameters)

    def box(self, name: str) -> Box:
        """Return the box of a whole parameter."""
        return Box.whole(self.parameters[name].shape)

    def of_all_stages(
        self, scalars: dict[str, dict[str, float]]
    ) -> dict[str, dict[str, float]]:
        """Return the numbers as they are: all parameters are here."""
        return scalars

    def free_gathered(self) -> None:
        """Do nothing: no weights are gathered."""


class _WholeState:
    """Optimizer state of whole parameters, with the settings of another optimizer."""

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
    parameters: dict[str, nn.Parameter] = {}
    whole = _WholeState(optimizer)
    for entry in model.entries.values():
        own = model.parameters.get(entry.name)
        values = model.whole_parts(entry, None if own is None else own.detach())
        mine = optimizer.state.get(own, {}) if own is not None else {}
        slots, scalars = _slots_of(mine, own, entry.name)
        keys = _keys_of_stage(model, entry, sorted(slots), scalars)
        # In the same order on all ranks, because each of these is a collective.
        pieces = {
            key: model.whole_parts(entry, slots.get(key)) for key in keys["slots"]
        }
        # After the collectives above, in which all ranks take part.
        if not ranks.is_first:
            continue
        for at, source in enumerate(entry.sources):
            parameter = nn.Parameter(values[at], requires_grad=False)
            parameters[source] = parameter
            state: dict[str, Any] = dict(keys["scalars"])
            state.update({key: parts[at] for key, parts in pieces.items()})
            if state:
                whole.state[parameter] = state
    save_training_state(
        folder,
        _WholeModel(parameters, ranks),
        cast(Optimizer, whole),
        scheduler,
    )


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
    # Whole on every rank, because parts of fused parameters are made of whole ones.
    parameters = {
        name: nn.Parameter(torch.zeros(shape), requires_grad=False)
        for name, shape in model.shapes.items()
    }
    whole = _WholeState(optimizer)
    load_training_state(
        folder,
        _WholeModel(parameters, ranks),
        cast(Optimizer, whole),
        scheduler,
    )
    with torch.no_grad():
        for name, own in model.parameters.items():
            entry = model.entry(name)
            values = [parameters[source] for source in entry.sources]
            own.copy_(model.own_part(entry, [v.detach() for v in values]))
            states = [whole.state.get(value, {}) for value in values]
            state: dict[str, Any] = {}
            for key, first in states[0].items():
                if isinstance(first, Tensor) and first.ndim:
                    parts = [state_[key] for state_ in states]
                    part = model.own_part(entry, parts).to(own.device)
                    # A copy: a part may be a view of the whole tensor, which would stay
                    # in memory.
                    state[key] = part.clone(memory_format=torch.contiguous_format)
                else:
                    state[key] = first
            if state:
                optimizer.state[own] = state


def _slots_of(
    state: dict[str, Any], own: Tensor | None, name: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Separate tensors of the parameter's shape from numbers."""
    slots: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or not value.ndim:
            if value is not None:
                scalars[key] = float(value)
        elif own is not None and value.shape == own.shape:
            slots[key] = value
        else:
            raise CheckpointError(
                f"the training state cannot be written: the optimizer keeps {key} of "
                f"shape {tuple(value.shape)} for {name}, and the training backend "
                "'megatron' writes state of the parameter's shape only; use AdamW or "
                "SGD"
            )
    return slots, scalars


def _keys_of_stage(
    model: MegatronModel, entry: Any, keys: list[str], scalars: dict[str, float]
) -> dict[str, Any]:
    """Return the keys of a parameter's state from its stage, on all stages."""
    known: dict[str, Any] = {"slots": keys, "scalars": scalars}
    return model.layout.object_from_stage(known, model.stage_of(entry))
