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

# A process that loads another model keeps its process group, so it keeps these as well:
# every new mesh would open further connections.
_meshes: dict[tuple[object, ...], DeviceMesh] = {}


class Layout:
    """The ranks as a grid: data-parallel outermost, tensor-parallel innermost.

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
        self.data_rank, self.tensor_rank = divmod(ranks.rank, self.tensor_size)
        self.num_replicas = config.dtensor.data_replicas
        self.shard_size = self.data_size // self.num_replicas
        """Ranks that the weights are sharded over, besides tensor-parallel ones."""
        self.replica_rank, self.shard_rank = divmod(self.data_rank, self.shard_size)
        self._mesh = self._made_mesh(config.dtensor.deadline_s)

    def _made_mesh(self, deadline_s: float) -> DeviceMesh | None:
        sizes = {_REPLICA: self.num_replicas, _TENSOR: self.tensor_size}
        shape = {
            name: size
            for name, size in (
                (_REPLICA, sizes[_REPLICA]),
                (_SHARD, self.shard_size),
                (_TENSOR, sizes[_TENSOR]),
            )
            if name == _SHARD or size > 1
        }
        if self.ranks.world_size == 1:
            return None
        device = self.ranks.device.type
        key = (dist.group.WORLD, device, *shape.items())
        mesh = _meshes.get(key)
        if mesh is None:
            names, dims = tuple(shape), tuple(shape.values())
            mesh = init_device_mesh(device, dims, mesh_dim_names=names)
            if self.num_replicas > 1 and self.tensor_size > 1:
                mesh[_REPLICA, _SHARD]._flatten("data")
            _meshes[key] = mesh
        # Groups of a mesh are made with torch's own limit of half an hour.
        for group in mesh.get_all_groups():
            _set_pg_timeout(timedelta(seconds=deadline_s), group)
        return mesh

    @property
    def data_mesh(self) -> DeviceMesh:
        """What FSDP shards over: one axis, or replicas and shards (HSDP)."""
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

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Add a small tensor over the ranks that have other rows, in place.

        The tensor-parallel ranks of each have the same rows, and the same values.
        """
        if self.data_size == 1:
            return values
        if self.tensor_size == 1:
            dist.all_reduce(values)
            return values
        assert self._mesh is not None
        name = "data" if self.num_replicas > 1 else _SHARD
        dist.all_reduce(values, group=self._mesh[name].get_group())
        return values


def forget_groups() -> None:
    """Let go of the groups along the axes, before the process group is left.

    They hold threads and connections for as long as somebody holds them.
    """
    _meshes.clear()
