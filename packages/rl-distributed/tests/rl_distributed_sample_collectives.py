"""A worker that forms a process group; apart, because it imports torch."""

from __future__ import annotations

import torch

from rl_distributed.collectives import (
    gather_jagged_object_lists,
    process_group,
    rebalance_nd_tensor,
)


class Rendezvous:
    """Forms a gloo process group in its constructor."""

    def __init__(self):
        torch.set_num_threads(1)
        self.scope = process_group("gloo", deadline_s=60)
        self.scope.__enter__()

    def total(self, value):
        tensor = torch.tensor([float(value)])
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    def rebalance(self, rows):
        tensor = torch.arange(rows * 2, dtype=torch.float32).reshape(rows, 2)
        return rebalance_nd_tensor(tensor).tolist()

    def jagged(self, items):
        return gather_jagged_object_lists(items)

    def close(self):
        self.scope.__exit__(None, None, None)
