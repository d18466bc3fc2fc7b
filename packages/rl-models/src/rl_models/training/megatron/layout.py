"""The place of a rank in the layout: its tensor, pipeline, data and expert groups.

Experts are dealt out over the tensor ranks of a stage first, and with
`policy.parallelism.expert` over several copies of the model. Each rank has some of
them, whole, so that no two ranks of such a group have the same ones.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from rl_models.config import ParallelismConfig, PolicyConfig
from rl_models.training.megatron.shims import CpuDevices, install_cpu_shims
from rl_models.training.megatron.traits import Traits
from rl_models.training.process_group import Ranks, join_process_group

__all__ = ["RankLayout", "join_layout", "leave_layout"]


@dataclass(frozen=True)
class RankLayout:
    """The process groups of one rank, and its place in each."""

    parallelism: ParallelismConfig
    data_size: int
    tensor_rank: int
    stage: int
    device: torch.device
    num_chunks: int = 1
    """Parts of the layers that each stage has, which take turns with those of others.
    """
    expert_size: int = 1
    """Number of ranks that share the experts of a layer."""
    expert_rank: int = 0

    @property
    def data_rank(self) -> int:
        """Number of this rank's copy of the model, and of its share of the rows."""
        return int(parallel_state.get_data_parallel_rank())

    @property
    def tensor_size(self) -> int:
        """Number of ranks that share each layer."""
        return self.parallelism.tensor

    @property
    def num_stages(self) -> int:
        """Number of ranks that divide the layers among them."""
        return self.parallelism.pipeline

    @property
    def model_size(self) -> int:
        """Number of ranks that hold one copy of the model together."""
        return self.tensor_size * self.num_stages

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.stage == self.num_stages - 1

    def has_embedding(self, chunk: int) -> bool:
        """Whether a part of this rank embeds tokens."""
        return self.is_first_stage and chunk == 0

    def has_head(self, chunk: int) -> bool:
        """Whether a part of this rank has the last layers."""
        return self.is_last_stage and chunk == self.num_chunks - 1

    def num_alike(self, *, of_experts: bool) -> int:
        """Return the number of ranks that hold the same part of a parameter.

        Tensor ranks that each hold all of it do not count.
        """
        if not of_experts:
            return self.data_size
        return self.data_size * self.tensor_size // self.expert_size

    def alike(self, *, of_experts: bool) -> dist.ProcessGroup:
        """Return these ranks."""
        group: dist.ProcessGroup
        if of_experts:
            group = parallel_state.get_expert_data_parallel_group()
        else:
            group = parallel_state.get_data_parallel_group()
        return group

    def devices(self) -> AbstractContextManager[Any]:
        """Return a context in which Megatron-core creates tensors on this device."""
        return CpuDevices() if self.device.type == "cpu" else nullcontext()

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Add up a tensor over the ranks with different rows, in place."""
        return self.sum_over_alike(values, of_experts=False)

    def sum_over_alike(self, values: Tensor, *, of_experts: bool) -> Tensor:
        """Add up a tensor over the ranks with the same parameters, in place."""
        if self.num_alike(of_experts=of_experts) > 1:
            dist.all_reduce(values, group=self.alike(of_experts=of_experts))
        return values

    def sum_over_tensor(self, values: Tensor) -> Tensor:
        """Add a tensor over the ranks that share each layer, in place."""
        if self.tensor_size > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(values, group=group)
        return values

    def sum_over_model(self, values: Tensor) -> Tensor:
        """Add a tensor over the ranks that hold one copy of the model, in place."""
        if self.model_size > 1:
            dist.all_reduce(values, group=parallel_state.get_model_parallel_group())
        return values

    def sum_over_experts(self, values: Tensor) -> Tensor:
        """Add a tensor over the ranks that hold one copy of all experts, in place."""
        if self.expert_size * self.num_stages > 1:
            group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            dist.all_reduce(values, group=group)
        return values

    def gather_over_tensor(self, value: Tensor) -> list[Tensor]:
        """Return the parts of all ranks that share each layer, in order."""
        if self.tensor_size == 1:
            return [value]
        return _gathered(value, parallel_state.get_tensor_model_parallel_group())

    def gather_over_experts(self, value: Tensor) -> list[Tensor]:
        """Return the parts of all ranks that share the experts, in order."""
        if self.expert_size == 1:
            return [value]
        return _gathered(value, parallel_state.get_expert_model_parallel_group())

    def from_stage(self, value: Tensor, stage: int) -> Tensor:
        """Send a tensor of one stage to the others, in place."""
        if self.num_stages > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            source = dist.get_global_rank(group, stage)
            dist.broadcast(value, src=source, group=group)
        return value

    def object_from_stage(self, value: dict[str, Any], stage: int) -> dict[str, Any]:
        """Return the value of one stage on all stages."""
        if self.num_stages == 1:
            return value
        group = parallel_state.get_pipeline_model_parallel_group()
        box = [value]
        source = dist.get_global_rank(group, stage)
        dist.broadcast_object_list(box, src=source, group=group)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here, at most for the group's deadline."""
        if dist.get_world_size() > 1:
            dist.barrier()


def _gathered(value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    return parts


def join_layout(
    config: PolicyConfig, ranks: Ranks, *, has_experts: bool = False
) -> RankLayout:
    """Join the process group, and cut it into the groups of the layout.

    A process that is in a layout already leaves its groups and joins new ones.

    Args:
        config: The policy's config.
        ranks: This rank among all.
        has_experts: Whether the model is a mixture of experts.
    """
    parallelism = config.parallelism
    num_chunks = config.megatron.virtual_stages
    experts: dict[str, int] = {}
    if has_experts:
        experts = {
            "expert_model_parallel_size": parallelism.expert * parallelism.tensor,
            "expert_tensor_parallel_size": 1,
        }
    data_size = parallelism.data_size(ranks.world_size)
    join_process_group(ranks, config.megatron.deadline_s)
    if not dist.is_initialized():
        # Megatron-core needs groups even in a process that is alone. A store in memory
        # takes no port.
        dist.init_process_group(
            "gloo" if ranks.device.type == "cpu" else "nccl",
            store=HashStore(),
            rank=0,
            world_size=1,
        )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    # The order of the driver's grid, where tensor ranks are neighbours and either the
    # shares of the rows or the stages are outermost.
    by_stage = Traits.stages_outermost(config)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_model_parallel_size=parallelism.pipeline,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        create_gloo_process_groups=False,
        # Megatron-core takes whole minutes.
        distributed_timeout_minutes=max(1, round(config.megatron.deadline_s / 60)),
        order="tp-cp-ep-dp-pp" if by_stage else "tp-cp-ep-pp-dp",
        **experts,
    )
    if ranks.device.type == "cpu":
        install_cpu_shims()
    else:
        tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    return RankLayout(
        parallelism,
        data_size,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        ranks.device,
        num_chunks,
        experts.get("expert_model_parallel_size", 1),
        parallel_state.get_expert_model_parallel_rank() if has_experts else 0,
    )


def leave_layout() -> None:
    """Leave the groups of the layout, if this process is in one."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
