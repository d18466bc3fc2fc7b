"""Process groups of torch among workers, and gathers of unequal parts.

They need torch, which is imported when one of them is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rl_distributed.errors import DeadlineExceededError, DistributedError
from rl_distributed.extras import require_torch

if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch

__all__ = ["gather_jagged_object_lists", "process_group", "rebalance_nd_tensor"]

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

ItemT = TypeVar("ItemT")


@contextmanager
def process_group(
    backend: str | None = None, *, deadline_s: float = 120.0
) -> Iterator[torch.distributed.ProcessGroup]:
    """Join the default process group of the worker's `RayWorkerGroup`.

    Args:
        backend: `gloo` or `nccl`; None: NCCL where the worker has a GPU.
        deadline_s: how long to wait for the other workers, at the start and in every
            collective call.

    Raises:
        DeadlineExceededError: not all workers joined in time.
        DistributedError: the variables that a worker group sets are missing.
        MissingExtraError: torch is not installed.
    """
    require_torch("process_group")
    missing = [name for name in _REQUIRED if name not in os.environ]
    if missing:
        raise DistributedError(
            f"a process group needs the variables {missing}, which RayWorkerGroup sets "
            "in its workers; set them where a worker class runs without Ray"
        )
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        torch.distributed.init_process_group(
            backend, timeout=timedelta(seconds=deadline_s)
        )
    except (
        torch.distributed.DistStoreError,
        torch.distributed.DistNetworkError,
    ) as error:
        raise DeadlineExceededError(
            f"rank {os.environ['RANK']} waited {deadline_s:g} s for "
            f"{os.environ['WORLD_SIZE']} workers at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}: {error}"
        ) from error
    world = torch.distributed.group.WORLD
    if world is None:
        raise DistributedError("torch made no default process group")
    try:
        yield world
    finally:
        torch.distributed.destroy_process_group()


def rebalance_nd_tensor(
    tensor: torch.Tensor, group: torch.distributed.ProcessGroup | None = None
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along axis 0, on every rank.

    The tensors may have different numbers of rows, also none; everything else about
    them must be equal.
    """
    num_ranks = torch.distributed.get_world_size(group)
    own = torch.tensor([tensor.shape[0]], dtype=torch.int64, device=tensor.device)
    # Row counts first, because every rank must know how far to pad.
    counts = [torch.zeros_like(own) for _ in range(num_ranks)]
    torch.distributed.all_gather(counts, own, group=group)
    rows = [int(count) for count in counts]
    most = max(rows)
    # All ranks send equal shapes, because gloo has no gather of unequal ones.
    padded = tensor.new_zeros((most, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in range(num_ranks)]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def gather_jagged_object_lists(
    local_objects: list[ItemT], group: torch.distributed.ProcessGroup | None = None
) -> list[ItemT]:
    """Concatenate the lists of all ranks, in the order of the ranks, on every rank."""
    lists: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(lists, local_objects, group=group)
    return [item for items in lists for item in items]
