"""Mixtures trained here and sampled by vLLM, with each step's weights."""

from __future__ import annotations

import shutil

import pytest
import torch
from matrix_cells import cells
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_models import HuggingFacePolicy, VllmGeneration
from rl_models.testing import TokenCrossEntropy, build_tiny_model
from rl_models.weights.sync import WeightSynchronizer

pytestmark = pytest.mark.slow

# vLLM's CPU kernels for experts need multiples of 32.
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 96,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES = {
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
}
GENERATION = {
    "backend": "vllm",
    "max_new_tokens": 8,
    "num_replicas": 1,
    "vllm": {"kv_cache_gib": 0.1, "max_num_seqs": 8},
    "weight_sync": {"probe": {"period": 1}},
}


def _mixture(family, folder):
    """Write a mixture with the tokenizer of the tiny models."""
    tokenizer = build_tiny_model(folder / "tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = FAMILIES[family]()
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / "model" / name)
    return folder / "model"


@pytest.mark.parametrize(
    ("family", "parallelism"),
    cells(
        [("mixtral", {}), ("qwen3_moe", {"expert": 2})], [("qwen3_moe", {"expert": 2})]
    ),
)
def test_vllm_samples_with_the_experts_of_each_step(
    ray_cluster, tmp_path, family, parallelism
):
    model = _mixture(family, tmp_path)
    num_ranks = parallelism.get("expert", 1)
    ids = torch.randint(3, 14, (4, 5), generator=torch.Generator().manual_seed(0))
    prompts = BatchedDataDict(input_ids=ids, input_lengths=torch.full((4,), 5))
    with RayVirtualCluster(
        [num_ranks], use_gpus=False, max_colocated_worker_groups=2
    ) as cluster:
        policy = HuggingFacePolicy(
            str(model),
            cluster,
            generation=GENERATION,
            parallelism=parallelism,
            max_total_sequence_length=32,
            optimizer={"kwargs": {"lr": 1e-2}},
        )
        generator = VllmGeneration(cluster, policy.config, load_weights=False)
        sync = WeightSynchronizer(policy, generator)
        for version in (1, 2):
            # Each sync is probed.
            assert sync.sync_weights() == version
            output = generator.generate(prompts)
            mask = (output["token_versions"] == version).long()
            assert mask.sum() == output["generation_lengths"].sum()
            rows = BatchedDataDict(
                input_ids=output["output_ids"],
                input_lengths=output["unpadded_sequence_lengths"],
                token_mask=mask,
                sample_mask=torch.ones(4),
            )
            apart = policy.get_logprobs(rows)["logprobs"] - output["logprobs"]
            assert (apart * mask).abs().max() < 1e-4
            policy.train(rows, TokenCrossEntropy())
            sync.mark_stale()
        assert generator.shutdown()
        assert policy.shutdown()
