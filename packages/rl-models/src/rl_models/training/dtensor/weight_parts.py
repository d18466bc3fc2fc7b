"""The parts of a rank in the tensors of a weight sync."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_models.checkpoint.sharded import Box
from rl_models.errors import WeightSyncError
from rl_models.training.dtensor.model import RankModel
from rl_models.training.dtensor.sharding import local_part
from rl_models.weight_request import WeightKind
from rl_models.weights.adapters import sent_name
from rl_models.weights.collecting import ShardedWeights

__all__ = ["sharded_weights"]


def sharded_weights(
    model: RankModel, kind: WeightKind, rounded_to: torch.dtype | None
) -> ShardedWeights:
    """Return what a rank holds of the tensors of a sync.

    Args:
        model: This rank's model.
        kind: Which tensors are sent.
        rounded_to: See `ShardedWeights`.

    Raises:
        WeightSyncError: A parameter is a sum over ranks.
    """
    # Weights that are still gathered would hide the shards.
    model.free_gathered()
    saved = model.saved()
    boxes = {
        name: model.box(name) if name in model.parameters else Box.whole(tensor.shape)
        for name, tensor in saved.items()
    }

    def part(name: str) -> Tensor:
        return _part(name, saved[name].detach())

    adapters = model.adapters
    if adapters is not None and kind == "merged":
        return ShardedWeights(
            model.whole_shapes(),
            boxes,
            part,
            rounded_to,
            adapters.sources(model.part_shapes()),
            adapters.merge,
        )
    shapes = model.part_shapes(trained=kind == "adapter")
    if adapters is None:
        return ShardedWeights(shapes, boxes, part, rounded_to)
    specs = {sent_name(name): shape for name, shape in shapes.items()}
    sources = {sent_name(name): (name,) for name in shapes}
    return ShardedWeights(specs, boxes, part, rounded_to, sources)


def _part(name: str, tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        raise WeightSyncError(
            f"{name} is a sum over ranks ({tensor.placements}), and a sync sends parts "
            "of a whole: redistribute it to shards before"
        )
    return local_part(tensor)
