"""The parts of a rank in the tensors of a weight sync, by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_models.training.megatron.model import MegatronModel
from rl_models.weights.collecting import ShardedWeights

__all__ = ["sharded_weights"]


def sharded_weights(
    model: MegatronModel,
    specs: Mapping[str, Tensor],
    rounded_to: torch.dtype | None,
) -> ShardedWeights:
    """Return what a rank holds of the tensors of a sync.

    Args:
        model: This rank's model.
        specs: The whole tensors, without data.
        rounded_to: See `ShardedWeights`.
    """
    own = {
        source: (entry, number)
        for entry in model.entries.values()
        if model.has(entry)
        for number, source in enumerate(entry.sources)
    }
    boxes = {
        source: model.boxes(entry)[number] for source, (entry, number) in own.items()
    }
    last: tuple[str, list[Tensor]] = "", []

    def part(source: str) -> Tensor:
        nonlocal last
        entry, number = own[source]
        # Queries, keys and values of a layer are taken apart at once, and asked for
        # one after the other.
        if last[0] != entry.name:
            last = entry.name, model.parts(entry, model.computed(entry.name))
        return last[1][number]

    return ShardedWeights(specs, boxes, part, rounded_to)
