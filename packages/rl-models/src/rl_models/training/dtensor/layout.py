"""This rank's place on the axes of `policy.parallelism`, and the groups along them."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from rl_models.config import PolicyConfig
from rl_models.training.process_group import Ranks

__all__ = ["Layout", "forget_groups"]

_REPLICA, _SHARD, _TENSOR = "replica", "shard", "tensor"
_CONTEXT, _EXPERT, _PIPELINE = "context", "expert", "pipeline"

# A process that loads another model keeps its process group, and so it keeps these:
# every new mesh would open more connections.
_meshes: dict[tuple[object, ...], DeviceMesh] = {}


class Layout:
    """The ranks as a grid: data, pipeline or context, and tensor, the last innermost.

    Args:
        ranks: This rank among all.
        config: The policy's config.

    Raises:
        ConfigError: The layout does not fit the number of ranks.
    """

    def __init__(self, ranks: Ranks, config: PolicyConfig) -> None:
        self.ranks = ranks
        self.tensor_size = config.parallelism.tensor
        self.splits_tokens = config.parallelism.sequence
        self.data_size = config.parallelism.data_size(ranks.world_size)
        self.context_size = config.parallelism.context
        self.num_stages = config.parallelism.pipeline
        # Pipeline and context parallelism exclude each other, so with stages, ranks
        # with different tokens are ranks with different rows.
        self.token_rank, within = divmod(ranks.rank, self.num_stages * self.tensor_size)
        self.stage, self.tensor_rank = divmod(within, self.tensor_size)
        """This rank's number among ranks with different tokens, and among ranks that
        share each layer."""
        self.data_rank, self.context_rank = divmod(self.token_rank, self.context_size)
        self.num_replicas = config.dtensor.data_replicas
        self.shard_size = self.data_size * self.context_size // self.num_replicas
        """Number of ranks that weights are sharded over, besides tensor-parallel ones.
        """
        self.replica_rank, self.shard_rank = divmod(self.token_rank, self.shard_size)
        self.expert_size = config.parallelism.expert
        self._deadline_s = config.dtensor.deadline_s
        self._mesh = self._made_mesh(
            {
                _REPLICA: self.num_replicas,
                _SHARD: self.shard_size,
                _PIPELINE: self.num_stages,
                _TENSOR: self.tensor_size,
            }
        )

    def _made_mesh(self, sizes: dict[str, int]) -> DeviceMesh | None:
        shape = {n: size for n, size in sizes.items() if n == _SHARD or size > 1}
        if self.ranks.world_size == 1:
            return None
        device = self.ranks.device.type
        # By process group: after leaving one and joining another, its meshes are of no
        # use.
        key = (dist.group.WORLD, device, *shape.items())
        mesh = _meshes.get(key)
        if mesh is None:
            names, dims = tuple(shape), tuple(shape.values())
            mesh = init_device_mesh(device, dims, mesh_dim_names=names)
            _meshes[key] = mesh
        # Groups of a mesh have torch's default limits: 10 minutes for NCCL, half an
        # hour for gloo.
        for group in mesh.get_all_groups():
            _set_pg_timeout(timedelta(seconds=self._deadline_s), group)
        return mesh

    @property
    def random_rank(self) -> int:
        """This rank's number among ranks that draw different random numbers."""
        return self.token_rank * self.num_stages + self.stage

    @property
    def is_sharded(self) -> bool:
        """Whether ranks with different tokens share weights (FSDP)."""
        return self.data_size * self.context_size > 1

    @property
    def shares_model(self) -> bool:
        """Whether this rank has only some of the model's weights."""
        return self.shard_size * self.num_stages * self.tensor_size > 1

    @property
    def shares_layers(self) -> bool:
        """Whether this rank computes each layer, or some of them, with others."""
        return self.tensor_size * self.context_size * self.expert_size > 1

    @property
    def data_mesh(self) -> DeviceMesh:
        """The axes that FSDP shards over: one, or replicas and shards (HSDP)."""
        assert self._mesh is not None
        if self.num_replicas > 1:
            return self._mesh[_REPLICA, _SHARD]
        return self._mesh[_SHARD]

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The ranks that share each layer with this one."""
        assert self._mesh is not None
        return self._mesh[_TENSOR]

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The process group of `tensor_mesh`."""
        return self.tensor_mesh.get_group()

    def pipeline_group(self) -> dist.ProcessGroup:
        """Return the ranks that have the other stages of this one's rows."""
        assert self._mesh is not None
        return self._mesh[_PIPELINE].get_group()

    def context_group(self) -> dist.ProcessGroup:
        """Return the ranks that share the tokens of this one's rows; collective."""
        mesh = self._made_mesh(
            {
                _SHARD: self.data_size,
                _CONTEXT: self.context_size,
                _TENSOR: self.tensor_size,
            }
        )
        assert mesh is not None
        return mesh[_CONTEXT].get_group()

    def expert_group(self) -> dist.ProcessGroup:
        """Return the ranks that share the experts with this one; collective."""
        return self._expert_mesh()[_EXPERT].get_group()

    @property
    def shards_of_experts(self) -> DeviceMesh:
        """The axes that FSDP shards experts over: the ranks that have the same ones."""
        mesh = self._expert_mesh()
        if self.num_replicas > 1:
            return mesh[_REPLICA, _SHARD]
        return mesh[_SHARD]

    def _expert_mesh(self) -> DeviceMesh:
        mesh = self._made_mesh(
            {
                _REPLICA: self.num_replicas,
                _SHARD: self.shard_size // self.expert_size,
                _EXPERT: self.expert_size,
                _TENSOR: self.tensor_size,
            }
        )
        assert mesh is not None
        return mesh

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Add up a small tensor over the ranks with different rows, in place.

        Other ranks have the same rows, and those of a last stage, which has the losses,
        have the same values.
        """
        # Over all ranks, with zeros from all but one of those with equal values.
        if self.ranks.world_size > 1:
            is_last_stage = self.stage == self.num_stages - 1
            if self.context_rank or self.tensor_rank or not is_last_stage:
                values.zero_()
            dist.all_reduce(values)
        return values


def forget_groups() -> None:
    """Drop the groups along the axes, before the process group is left.

    They keep threads and connections alive as long as they are referenced.
    """
    _meshes.clear()
