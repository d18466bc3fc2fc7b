"""Memory of one rank of a model, by training backend."""

from __future__ import annotations

from rl_models.config import PolicyConfig
from rl_models.planning.dtensor_memory import dtensor_memory
from rl_models.planning.layouts import Layout
from rl_models.planning.megatron_memory import megatron_memory
from rl_models.planning.model_shape import ModelShape
from rl_models.planning.rank_memory import ModelMemory, RankWork

__all__ = ["model_memory"]


def model_memory(
    shape: ModelShape, policy: PolicyConfig, layout: Layout, work: RankWork
) -> ModelMemory:
    """Return the memory of one rank, at most.

    Args:
        shape: Sizes of the model.
        policy: Its configuration.
        layout: How ranks share it.
        work: What a rank does with it.
    """
    count = megatron_memory if layout.backend == "megatron" else dtensor_memory
    return count(shape, policy, layout, work)
