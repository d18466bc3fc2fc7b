"""Local Ray clusters for tests, and checks of what others implement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rl_distributed.cluster.start import init_ray
from rl_distributed.metrics.contract import SinkContractError, check_metric_sink
from rl_distributed.transfer.contract import TransferContractError, check_transfer

__all__ = [
    "SinkContractError",
    "TransferContractError",
    "check_metric_sink",
    "check_transfer",
    "local_ray",
]


@contextmanager
def local_ray(num_cpus: int = 2, *, deadline_s: float = 120.0) -> Iterator[None]:
    """Have Ray up on this machine inside the block, and gone after it.

    A Ray that is up already is used as it is, and left alone.
    """
    started = False
    if not ray.is_initialized():
        started = init_ray(num_cpus, address="local", deadline_s=deadline_s)
    try:
        yield
    finally:
        if started:
            ray.shutdown()
