"""Replicas that die or hang during generation, with the fastest-starting backend."""

from __future__ import annotations

import signal

import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_models.errors import GenerationError
from rl_models.generation.config import GenerationConfig
from rl_models.policy.generation_policy import GenerationPolicy

pytestmark = pytest.mark.slow

CONFIG = GenerationConfig(
    max_new_tokens=110,
    stop_token_ids=[],
    max_batch_size=64,
    heartbeat_limit_s=2.0,
    start_deadline_s=120,
)


def make_rows(num_rows=512):
    generator = torch.Generator().manual_seed(1)
    return BatchedDataDict(
        input_ids=torch.randint(3, 13, (num_rows, 9), generator=generator),
        input_lengths=torch.full((num_rows,), 9),
        seeds=torch.arange(num_rows),
    )


@pytest.fixture(scope="module")
def expected(ray_cluster, tiny_folder):
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        policy = GenerationPolicy(cluster, CONFIG, model_name=tiny_folder)
        output = policy.generate(make_rows())
        assert policy.shutdown()
    return output["output_ids"]


def test_rows_of_lost_replicas_go_to_others_and_these_come_back(
    ray_cluster, tiny_folder, expected, signal_in_generation
):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        policy = GenerationPolicy(cluster, CONFIG, model_name=tiny_folder)
        try:
            pids = policy.group.worker_pids
            for rank, number in ((1, signal.SIGKILL), (0, signal.SIGSTOP)):
                with signal_in_generation(policy, rank, number):
                    output = policy.generate(make_rows())
                assert torch.equal(output["output_ids"], expected)
                assert policy.replicas.settle() == [0, 1]
                assert policy.replicas.serving == [0, 1]
            assert not set(pids) & set(policy.group.worker_pids)
            assert torch.equal(policy.generate(make_rows())["output_ids"], expected)
        finally:
            policy.shutdown()


def test_the_only_replica_is_replaced_until_tries_are_used_up(
    ray_cluster, tiny_folder, expected, signal_in_generation
):
    # A replica starved on a busy machine must not count as hung here.
    config = CONFIG.model_copy(update={"max_restarts": 1, "heartbeat_limit_s": 60.0})
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        policy = GenerationPolicy(cluster, config, model_name=tiny_folder)
        try:
            with signal_in_generation(policy, 0, signal.SIGKILL):
                output = policy.generate(make_rows())
            assert torch.equal(output["output_ids"], expected)
            with (
                signal_in_generation(policy, 0, signal.SIGKILL),
                pytest.raises(GenerationError, match=r"No generation replica is left"),
            ):
                policy.generate(make_rows())
            assert policy.num_replicas == 0
        finally:
            policy.shutdown()
