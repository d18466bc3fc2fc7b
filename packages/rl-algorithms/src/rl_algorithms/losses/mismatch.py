"""Distributions of the difference between trainer's and sampler's log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_distributed.metrics.distribution import Distribution

__all__ = ["LOG_RATIO", "POSITION_EDGES", "log_ratios_by_position", "position_label"]

LOG_RATIO = "mismatch/log_ratio"
"""Prefix of the metrics with log-ratios, followed by the label of a bucket."""
POSITION_EDGES = (64, 256, 1024, 4096)
"""First positions of the buckets after the first one."""


def position_label(bucket: int) -> str:
    """Return the name of a bucket by its first and last position: `pos_64_255`."""
    first = 0 if bucket == 0 else POSITION_EDGES[bucket - 1]
    if bucket == len(POSITION_EDGES):
        return f"pos_{first}_up"
    return f"pos_{first}_{POSITION_EDGES[bucket] - 1}"


def log_ratios_by_position(
    log_ratio: Tensor, positions: Tensor
) -> dict[str, Distribution]:
    """Return distributions of `log p_trainer - log p_sampler`, which can be merged.

    Args:
        log_ratio: [N], one number per trained token.
        positions: [N], its position in the row.
    """
    # On the host, because a device would have to wait for the size of each selection
    # below.
    ratios, places = log_ratio.detach().cpu(), positions.cpu()
    # right=True: an edge is the first position of its bucket, not the last of the one
    # before.
    buckets = torch.bucketize(places, torch.tensor(POSITION_EDGES), right=True)
    return {
        f"{LOG_RATIO}/{position_label(bucket)}": Distribution.of(
            ratios[buckets == bucket]
        )
        for bucket in torch.unique(buckets).tolist()
    }
