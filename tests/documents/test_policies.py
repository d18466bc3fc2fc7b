"""Documented programs about policies, worker groups and backends by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import ray

from rl_distributed.errors import RegistryError, ResourceInsufficientError
from rl_models import get_generation_backend, get_training_backend

Run = Callable[..., dict[str, Any]]


def test_worker_group_of_a_class(run_program: Run) -> None:
    names = run_program("worker_group")
    with names["cluster"], names["worker_group"] as group:
        ((rank, pid),) = ray.get(group.run_all_workers_single_data("rank"))
    assert rank == 0
    assert pid != os.getpid()
    large = names["large_cluster"]
    assert (large.node_count(), large.world_size()) == (2, 16)
    with pytest.raises(ResourceInsufficientError, match="8"):
        large.get_placement_groups()


def test_backends_by_name(run_program: Run) -> None:
    names = run_program("named_backends")
    assert names["training"].__name__ == "DTensorTrainingBackend"
    assert callable(names["training"].train_step)
    assert names["generation"].__name__ == "VllmGenerationBackend"
    assert callable(names["generation"].generate)
    with pytest.raises(RegistryError, match=r"'dtensr'.*dtensor"):
        get_training_backend("dtensr")
    with pytest.raises(RegistryError, match=r"'vlm'.*vllm"):
        get_generation_backend("vlm")
