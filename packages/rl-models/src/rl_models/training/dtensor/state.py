"""Training state for an exact resume: parameters, optimizer, schedule, random numbers.

Parameters and optimizer state are written as shards (`checkpoint.sharded`); scalars of
the optimizer (its step counts), its settings and the schedule go to `state.json`. State
of another shape than its parameter, such as that of Adafactor, is written where one
rank has the whole parameter.
Random states are per rank: when resuming on more ranks, the additional ones keep the
state of their seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rl_distributed.errors import CheckpointError
from rl_models.checkpoint.sharded import (
    Box,
    Shard,
    ShardedReader,
    write_shards,
    write_state,
)
from rl_models.training.dtensor.sharding import local_part
from rl_models.training.process_group import Ranks

__all__ = [
    "StatefulModel",
    "load_training_state",
    "save_training_state",
    "saved_names",
]

_CPU_RANDOM, _GPU_RANDOM = "random/cpu", "random/cuda"
# Of torch's optimizers, those of ASGD and NAdam included: a state that was written
# before it said which scalars are tensors.
_TENSOR_SCALARS = ("step", "eta", "mu", "mu_product")


class StatefulModel(Protocol):
    """The interface between a model of one rank and its training state."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters by name, each this rank's part."""
        ...

    @property
    def ranks(self) -> Ranks:
        """This rank."""
        ...

    def writes(self, name: str) -> bool:
        """Return whether this rank writes its part of a parameter."""
        ...

    def expected_in(self, saved: Set[str]) -> Set[str]:
        """Return the parameters that a state must have, given those that it has."""
        ...

    def box(self, name: str) -> Box:
        """Return which part of the whole parameter this rank has."""
        ...

    def of_all_stages(
        self, scalars: dict[str, dict[str, float]]
    ) -> dict[str, dict[str, float]]:
        """Return numbers by parameter, including parameters of other ranks."""
        ...

    def free_gathered(self) -> None:
        """Drop gathered weights."""
        ...


def save_training_state(
    folder: Path,
    model: StatefulModel,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
) -> None:
    """Write this rank's shards and, on the first rank, the common state.

    Raises:
        CheckpointError: The folder cannot be written, or ranks share a parameter whose
            optimizer state has another shape.
    """
    # Gathered weights stand in place of the shards that are to be written.
    model.free_gathered()
    shards: dict[str, Shard] = {}
    scalars: dict[str, dict[str, float]] = {}
    tensor_scalars: set[str] = set()
    for name, parameter in model.parameters.items():
        writes = model.writes(name)
        if writes:
            shards[f"parameter/{name}"] = _shard(model, name, parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.ndim:
                if writes:
                    slot = f"optimizer/{name}/{key}"
                    shards[slot] = _slot(model, name, parameter, key, value)
            else:
                scalars.setdefault(name, {})[key] = float(value)
                if isinstance(value, Tensor):
                    tensor_scalars.add(key)
    # Only the first rank writes them, and it has the parameters of its stage alone.
    scalars = model.of_all_stages(scalars)
    random_state = torch.get_rng_state()
    shards[_CPU_RANDOM] = Shard(random_state, Box.whole(random_state.shape))
    if model.ranks.device.type == "cuda":
        random_state = torch.cuda.get_rng_state(model.ranks.device)
        shards[_GPU_RANDOM] = Shard(random_state, Box.whole(random_state.shape))
    write_shards(folder, shards, model.ranks.rank, model.ranks.world_size)
    if model.ranks.is_first:
        groups = optimizer.state_dict()["param_groups"]
        state = {
            "param_groups": [_settings(group) for group in groups],
            "optimizer_scalars": scalars,
            "tensor_scalars": sorted(tensor_scalars),
            "scheduler": _schedule_state(scheduler) if scheduler else None,
        }
        write_state(folder, state, model.ranks.world_size)


def saved_names(folder: Path) -> set[str]:
    """Return the names of the parameters that a training state holds.

    Raises:
        CheckpointError: The folder is damaged.
    """
    return _parameter_names(ShardedReader(folder))


def _parameter_names(reader: ShardedReader) -> set[str]:
    prefix = "parameter/"
    return {n.removeprefix(prefix) for n in reader.names() if n.startswith(prefix)}


def load_training_state(
    folder: Path,
    model: StatefulModel,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
) -> None:
    """Restore a state of `save_training_state`, on any number of ranks.

    Raises:
        CheckpointError: The folder is damaged or belongs to another model.
    """
    reader = ShardedReader(folder)
    model.free_gathered()
    saved = _parameter_names(reader)
    wanted = model.expected_in(saved)
    if saved != wanted:
        odd = sorted(saved ^ wanted)[:3]
        raise CheckpointError(
            f"the training state in {folder} belongs to another model: parameters such "
            f"as {', '.join(odd)} are only in one of the two; resume with the same "
            "policy.model_name and policy.lora"
        )
    slots: dict[str, list[str]] = {}
    for name in reader.names():
        if name.startswith("optimizer/"):
            owner, _, key = name.removeprefix("optimizer/").rpartition("/")
            slots.setdefault(owner, []).append(key)
    scalars = reader.state["optimizer_scalars"]
    # A count of steps has been a tensor after every resume, whatever it was before.
    tensor_scalars = {"step", *reader.state.get("tensor_scalars", _TENSOR_SCALARS)}
    for name, parameter in model.parameters.items():
        # A frozen base, which the state leaves out and the model has loaded.
        if name not in saved:
            continue
        box = model.box(name)
        reader.read_into(f"parameter/{name}", local_part(parameter.detach()), box)
        state: dict[str, Any] = {
            key: _read_slot(reader, f"optimizer/{name}/{key}", parameter, box)
            for key in sorted(slots.get(name, []))
        }
        for key, value in scalars.get(name, {}).items():
            state[key] = value
            if key in tensor_scalars:
                state[key] = _scalar(optimizer, parameter, key, value)
        if state:
            optimizer.state[parameter] = state
    _restore_settings(optimizer, reader.state["param_groups"])
    if scheduler is not None and reader.state["scheduler"] is not None:
        scheduler.load_state_dict(reader.state["scheduler"])
    _restore_random_state(reader, model)


def _shard(model: StatefulModel, name: str, value: Tensor) -> Shard:
    return Shard(local_part(value.detach()), model.box(name))


def _slot(
    model: StatefulModel, name: str, parameter: Tensor, key: str, value: Tensor
) -> Shard:
    """Return optimizer state of a parameter as it is written."""
    if value.shape == parameter.shape:
        return _shard(model, name, value)
    if not _is_whole(model.box(name)):
        raise CheckpointError(
            f"the training state cannot be written: the optimizer keeps {key} of shape "
            f"{tuple(value.shape)} for {name} of shape {tuple(parameter.shape)}, and "
            "state of another shape than its parameter is written by a rank that has "
            "the whole parameter only; use AdamW or SGD, or train on one worker"
        )
    return Shard(value.detach(), Box.whole(value.shape))


def _read_slot(reader: ShardedReader, slot: str, parameter: Tensor, box: Box) -> Tensor:
    """Return optimizer state of a parameter, of which this rank has the box."""
    shape = reader.shape(slot)
    if shape != box.global_shape and _is_whole(box):
        other = parameter.detach().new_zeros(shape)
        reader.read_into(slot, other)
        return other
    # Like the parameter, and so a DTensor where that is one: optimizers refuse to mix
    # them.
    value = torch.zeros_like(parameter.detach())
    reader.read_into(slot, local_part(value), box)
    return value


def _is_whole(box: Box) -> bool:
    return box.sizes == box.global_shape


def _scalar(optimizer: Optimizer, parameter: Tensor, key: str, value: float) -> Tensor:
    """Return a scalar that the optimizer keeps as a float32 tensor, as all of torch."""
    group = optimizer.param_groups[0]
    # Fused and capturable steps read the count on the device, others on the CPU. Other
    # numbers are beside the parameter, where torch puts them in `load_state_dict`.
    beside = key != "step" or group.get("fused") or group.get("capturable")
    device = parameter.device if beside else None
    return torch.tensor(value, dtype=torch.float32, device=device)


def _schedule_state(scheduler: LRScheduler) -> Any:
    """Return the position in the schedule; its shape comes from the config."""
    state = dict(scheduler.state_dict())
    # `load_state_dict` expects an entry per function; None keeps the one it has.
    if "lr_lambdas" in state:
        state["lr_lambdas"] = [None] * len(state["lr_lambdas"])
    return _json(state)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in group.items() if key != "params"}
    return {key: _json(value) for key, value in kept.items()}


def _restore_settings(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(value, list) else value


def _json(value: Any) -> Any:
    """Return plain data; numbers keep every bit, and callables are left out."""
    if isinstance(value, dict):
        return {k: _json(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, list | tuple):
        return [_json(v) for v in value if not callable(v)]
    if isinstance(value, Tensor):
        return value.tolist()
    return value


def _restore_random_state(reader: ShardedReader, model: StatefulModel) -> None:
    state = reader.on_rank(_CPU_RANDOM, model.ranks.rank)
    if state is not None:
        torch.set_rng_state(state)
    if model.ranks.device.type == "cuda":
        state = reader.on_rank(_GPU_RANDOM, model.ranks.rank)
        if state is not None:
            torch.cuda.set_rng_state(state, model.ranks.device)
