"""A worker that forms a process group; separate, because it imports torch."""

from __future__ import annotations

import os

import torch
from rl_distributed_sample_workers import Ledger

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

    def total_unless(self, value, failing_rank):
        """Raise in one rank while all others wait in the collective."""
        if int(os.environ["RANK"]) == failing_rank:
            raise ValueError("no share of mine")
        return self.total(value)

    def port(self):
        return os.environ["MASTER_PORT"]

    def rebalance(self, rows):
        tensor = torch.arange(rows * 2, dtype=torch.float32).reshape(rows, 2)
        return rebalance_nd_tensor(tensor).tolist()

    def jagged(self, items):
        return gather_jagged_object_lists(items)

    def close(self):
        self.scope.__exit__(None, None, None)


class CollectiveLedger(Ledger):
    """A ledger for workers that wait for each other in every call."""

    def __init__(self, folder):
        super().__init__(folder)
        torch.set_num_threads(1)
        self.scope = process_group("gloo", deadline_s=60)
        self.scope.__enter__()

    def enter(self, row, number, seconds):
        result = super().enter(row, number, seconds)
        same = torch.tensor([float(number)])
        torch.distributed.all_reduce(same)
        assert same.item() == number * torch.distributed.get_world_size()
        return result
