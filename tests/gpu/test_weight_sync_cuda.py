"""Weights from a trainer to a replica on the same GPU, over every suitable transport.

Both are Ray actors; without Ray these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.testing import local_ray
from rl_models.generation.config import GenerationConfig
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.testing import build_tiny_model
from rl_models.weights.config import WeightSyncConfig
from rl_models.weights.sync import WeightSynchronizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    folder: Path = build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    with (
        local_ray(2),
        RayVirtualCluster([1], use_gpus=True, max_colocated_worker_groups=2) as cluster,
    ):
        trainer = HuggingFacePolicy(folder, cluster, max_total_sequence_length=64)
        config = GenerationConfig(max_new_tokens=8)
        replica = GenerationPolicy(
            cluster, config, model_name=folder, load_weights=False
        )
        yield trainer, replica
        trainer.shutdown()
        replica.shutdown()


@pytest.mark.parametrize("transport", ["object_store", "shared_memory", "cuda_ipc"])
def test_the_probe_agrees_after_a_sync(pair: tuple[Any, Any], transport: str) -> None:
    trainer, replica = pair
    # On a GPU either side sums in a different order.
    probe = {"period": 1, "max_difference": 1e-3, "mean_difference": 1e-3}
    config = WeightSyncConfig.from_dict(
        {"transport": transport, "bucket_bytes": 8192, "probe": probe}
    )
    sync = WeightSynchronizer(trainer, replica, config)
    assert sync.sync_weights() == sync.sync_weights() - 1
    sync.close()
