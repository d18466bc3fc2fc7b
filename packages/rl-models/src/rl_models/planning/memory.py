"""Memory of one rank of a model, by training backend."""

from __future__ import annotations

from rl_models.config import PolicyConfig
from rl_models.planning.dtensor_memory import dtensor_memory
from rl_models.planning.layouts import Layout
from rl_models.planning.megatron_memory import megatron_memory
from rl_models.planning.model_shape import ModelShape
from rl_models.planning.rank_memory import MicroBatch, ModelMemory

__all__ = ["model_memory"]


def model_memory(
    shape: ModelShape,
    policy: PolicyConfig,
    layout: Layout,
    *,
    training: MicroBatch,
    passing: MicroBatch,
    num_micro_batches: int,
    on_gpu: bool,
    is_trained: bool = True,
    keeps_logits: bool = False,
) -> ModelMemory:
    """Return the memory of one rank, at most.

    Args:
        shape: Sizes of the model.
        policy: Its configuration.
        layout: How ranks share it.
        training: The largest micro-batch of training.
        passing: The largest one of a pass without gradients.
        num_micro_batches: Micro-batches per optimizer step.
        on_gpu: Whether ranks have GPUs.
        is_trained: False for a reference policy or a teacher.
        keeps_logits: Whether a loss needs more of the logits than log-probs, as in
            distillation: they then exist all at once.
    """
    count = megatron_memory if layout.backend == "megatron" else dtensor_memory
    return count(
        shape,
        policy,
        layout,
        training=training,
        passing=passing,
        num_micro_batches=num_micro_batches,
        on_gpu=on_gpu,
        is_trained=is_trained,
        keeps_logits=keeps_logits,
    )
