"""The place of this process among the ranks, and their process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from rl_distributed.errors import ConfigError

__all__ = ["Ranks", "join_process_group", "leave_process_group"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank of a group of workers."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Ranks:
        """Read `RANK` and `WORLD_SIZE`; a process without them is alone."""
        environment = os.environ if environment is None else environment
        rank = int(environment.get("RANK", "0"))
        world_size = int(environment.get("WORLD_SIZE", "1"))
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"RANK must be from 0 to WORLD_SIZE - 1: got {rank} of {world_size}"
            )
        if not torch.cuda.is_available():
            return cls(rank, world_size, torch.device("cpu"))
        # A worker that sees a single GPU knows it as number 0, whatever its local rank.
        local = int(environment.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        return cls(rank, world_size, torch.device("cuda", local))

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files that are written once."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add a small tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here, at most for the group's deadline."""
        if self.world_size > 1:
            dist.barrier()


def join_process_group(ranks: Ranks, deadline_s: float) -> None:
    """Join gloo (CPU) or NCCL (GPU) at `MASTER_ADDR:MASTER_PORT`.

    A process that is in a group stays in it, with the new deadline.
    """
    if ranks.world_size == 1:
        return
    if dist.is_initialized():
        # Not left and joined again: at the same port ranks could meet others that have
        # not left yet.
        _set_pg_timeout(timedelta(seconds=deadline_s))
        return
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        # NCCL uses the current device, which is number 0 otherwise.
        torch.cuda.set_device(ranks.device)
    # With gloo on a GPU as well, for collectives of tensors on the CPU.
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=deadline_s),
    )


def leave_process_group() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
