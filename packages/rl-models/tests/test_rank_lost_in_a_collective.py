"""A rank that dies while the others wait for it in a collective."""

from __future__ import annotations

import os
import signal
import time
from itertools import product
from pathlib import Path

import psutil
import pytest
import ray
import torch
from matrix_cells import cells
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import WorkerDiedError
from rl_models.config import PolicyConfig
from rl_models.errors import WeightSyncError
from rl_models.generation.config import GenerationConfig
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.policy.training_policy import TrainingPolicy
from rl_models.testing import TokenCrossEntropy
from rl_models.weights.config import WeightSyncConfig
from rl_models.weights.sync import WeightSynchronizer

pytestmark = pytest.mark.slow

# A measured limit: the guarantee. It usually takes about two seconds.
RELEASED_S = 10.0
EXPERT = {"parallelism": {"expert": 2}}
MEGATRON = {"backend": "megatron"}
LAYOUTS = {
    "tensor": {"parallelism": {"tensor": 2}},
    "data": {"parallelism": {"data": 2}},
    "context": {"parallelism": {"context": 2}},
    "pipeline": {"parallelism": {"pipeline": 2}},
    "expert": EXPERT,
    "megatron-tensor": {**MEGATRON, "parallelism": {"tensor": 2}},
    "megatron-pipeline": {**MEGATRON, "parallelism": {"pipeline": 2}},
    "megatron-expert": {**MEGATRON, **EXPERT},
}


@pytest.fixture(scope="module")
def fatal_loss():
    """Return a loss that kills one rank during computation; the others continue."""

    # Local, so that it reaches workers by value: Megatron-core's lack pytest.
    class Fatal(TokenCrossEntropy):
        def __call__(self, *arguments, **inputs):
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(*arguments, **inputs)

    return Fatal()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with a tiny mixture-of-experts model, for the dense one's batches."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    dense = AutoConfig.from_pretrained(tiny_model)
    config = Qwen3MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=32,
        head_dim=8,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", cells(LAYOUTS, ["data", "megatron-pipeline"]))
def test_the_others_are_released_with_the_cause(
    ray_cluster, tiny_model, mixture, make_batch, fatal_loss, layout
):
    settings = LAYOUTS[layout]
    model = mixture if "expert" in settings["parallelism"] else tiny_model
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        config = PolicyConfig.from_dict(
            {"model_name": str(model), "max_total_sequence_length": 32, **settings}
        )
        policy = TrainingPolicy(cluster, config)
        try:
            workers = [psutil.Process(worker.pid) for worker in policy.group.health()]
            # Everything built on first use now exists.
            policy.get_logprobs(make_batch(4))
            began = time.monotonic()
            with pytest.raises(
                WorkerDiedError, match=r"(?s)worker 1 of group 'policy'.*SIGKILL"
            ):
                policy.train(make_batch(4), fatal_loss)
            assert time.monotonic() - began < RELEASED_S
            # The waiting rank does not stay in its collective.
            _, left = psutil.wait_procs(workers, 60)
            assert left == []
        finally:
            policy.shutdown()


@pytest.mark.parametrize(
    ("layout", "transport"),
    cells(
        product(["data", "pipeline"], ["object_store", "shared_memory"]),
        [("data", "shared_memory"), ("pipeline", "object_store")],
    ),
)
def test_a_sync_in_which_a_rank_dies_ends_with_the_cause(
    ray_cluster, tiny_folder, layout, transport
):
    # One tensor per bucket, so that both ranks often send and wait for each other.
    settings = WeightSyncConfig(
        transport=transport, bucket_bytes=1, probe={"period": 0}
    )
    with RayVirtualCluster(
        [2], use_gpus=False, max_colocated_worker_groups=2
    ) as cluster:
        config = PolicyConfig.from_dict(
            {"model_name": str(tiny_folder), **LAYOUTS[layout]}
        )
        policy = TrainingPolicy(cluster, config)
        generation = GenerationPolicy(
            cluster,
            GenerationConfig(max_new_tokens=4, num_replicas=1),
            model_name=tiny_folder,
            load_weights=False,
        )
        sync = WeightSynchronizer(policy, generation, settings)
        try:
            workers = [psutil.Process(worker.pid) for worker in policy.group.health()]
            sync.sync_weights()
            call = policy.group.workers[1].__ray_call__.remote(_die_while_packing)
            ray.get(call, timeout=60)
            began = time.monotonic()
            with pytest.raises(
                WeightSyncError, match=r"(?s)worker 1 of group 'policy'.*SIGKILL"
            ):
                sync.sync_weights()
            assert time.monotonic() - began < RELEASED_S
            _, left = psutil.wait_procs(workers, 60)
            assert left == []
        finally:
            sync.close()
            generation.shutdown()
            policy.shutdown()


def _die_while_packing(host):
    """Kill this rank while packing its third bucket."""
    import rl_models.weights.sending as sending  # noqa: PLC0415

    class Fatal(sending.BlockPacker):
        count = 0

        def block(self, bucket):
            Fatal.count += 1
            if Fatal.count == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().block(bucket)

    sending.BlockPacker = Fatal
