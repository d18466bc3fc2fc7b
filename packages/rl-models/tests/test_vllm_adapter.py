"""vLLM with adapters sent alone: log-probs, versions, and rejected settings."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.generation.vllm.adapter_args import SCALE
from rl_models.generation.vllm.engine_args import engine_args
from rl_models.lora_config import LoRAConfig
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.policy.preflight import check_policy
from rl_models.policy.vllm_generation import VllmGeneration
from rl_models.testing import TokenCrossEntropy
from rl_models.weights.config import WeightSyncConfig
from rl_models.weights.sync import WeightSynchronizer

# More than the model's columns, and not a size for which vLLM has buffers.
LORA = {"r": 40, "sync": "adapter"}
ENGINE = {"kv_cache_gib": 0.125, "max_num_seqs": 16}


def rows(seed=0, num_rows=6, width=24):
    """Return rows of one length, trained on except for their first token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(num_rows, width)
    mask[:, 0] = 0
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, 13, (num_rows, width), generator=generator),
            "input_lengths": torch.full((num_rows,), width),
            "token_mask": mask,
            "sample_mask": torch.ones(num_rows),
        }
    )


def disagreement(trainer, generation, width):
    """Return the largest log-prob difference on rows sampled by the replicas."""
    data = rows(9, width=width)
    prompts = {name: data[name] for name in ("input_ids", "input_lengths")}
    output = generation.generate(BatchedDataDict({**prompts, "seeds": torch.arange(6)}))
    totals = output["unpadded_sequence_lengths"]
    sampled = BatchedDataDict(
        {"input_ids": output["output_ids"], "input_lengths": totals}
    )
    logprobs = trainer.get_logprobs(sampled)["logprobs"]
    columns = torch.arange(output["output_ids"].shape[1])
    mask = (columns >= width) & (columns < totals[:, None])
    versions = output["token_versions"][mask].unique().tolist()
    assert versions == [generation.weight_version]
    return (logprobs - output["logprobs"])[mask].abs().max().item()


class Noting:
    """A trainer that records which kinds of weights were requested."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.kinds = []

    def __getattr__(self, name):
        return getattr(self.trainer, name)

    def start_weight_export(self, request, link=None):
        self.kinds.append(request.kind)
        return self.trainer.start_weight_export(request, link)


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4) as made:
        yield made


@pytest.fixture(scope="module")
def trainer(cluster, vllm_folder):
    made = HuggingFacePolicy(
        vllm_folder,
        cluster,
        lora=LORA,
        optimizer={"kwargs": {"lr": 2e-2}},
        generation={"max_new_tokens": 8, "vllm": ENGINE, "max_restarts": 5},
    )
    yield made
    assert made.shutdown()


@pytest.fixture
def following(cluster, trainer):
    """Start a replica, and return a function that brings it the trainer's weights."""
    with ExitStack() as stack:

        def start(**engine):
            section = {
                "max_new_tokens": 8,
                "num_replicas": 1,
                "vllm": {**ENGINE, **engine},
            }
            config = trainer.config.replace(generation=section)
            generation = VllmGeneration(cluster, config, load_weights=False)
            stack.callback(generation.shutdown)
            source = Noting(trainer)
            settings = WeightSyncConfig(deadline_s=60.0, bucket_bytes=8192)
            sync = WeightSynchronizer(source, generation, settings)
            stack.callback(sync.close)
            return generation, source, sync

        yield start


@pytest.mark.slow
def test_versions_of_an_adapter(trainer, following):
    generation, source, sync = following()
    for seed in range(2):
        trainer.train(rows(seed), TokenCrossEntropy())
        sync.sync_weights()
        # The second is longer than a block of the prompt cache.
        assert disagreement(trainer, generation, 9) < 1e-4
        assert disagreement(trainer, generation, 200) < 1e-4
    assert source.kinds == ["apart", "adapter"]
    assert generation.changed_weights(0) == []

    # A restarted replica has neither base nor adapter.
    for number in generation.group.worker_pids:
        os.kill(number, signal.SIGKILL)
    assert disagreement(trainer, generation, 9) < 1e-4
    trainer.train(rows(2), TokenCrossEntropy())
    assert disagreement(trainer, generation, 9) > 1e-3
    sync.sync_weights()
    assert disagreement(trainer, generation, 9) < 1e-4
    assert source.kinds[2:] == ["apart", "adapter"]


@pytest.mark.slow
# CI covers adapters in one engine, and engines of two workers, separately.
@pytest.mark.matrix
def test_versions_of_an_adapter_in_an_engine_that_two_workers_share(trainer, following):
    generation, source, sync = following(async_engine=True, tensor_parallel_size=2)
    for seed in range(3, 5):
        trainer.train(rows(seed), TokenCrossEntropy())
        sync.sync_weights()
        assert disagreement(trainer, generation, 200) < 1e-4
    assert source.kinds == ["apart", "adapter"]
    assert generation.changed_weights(0) == []


def arguments(lora, **engine):
    config = GenerationConfig(max_new_tokens=4, vllm=engine)
    return engine_args(
        config, model_name="model", adapter=LoRAConfig(**lora), on_gpu=False
    )


def test_an_engine_has_room_for_one_adapter():
    found = arguments({"r": 5, "alpha": 15.0})
    assert found["enable_lora"]
    assert found["max_loras"] == 1
    assert found["max_lora_rank"] == 8
    assert found["additional_config"] == {SCALE: 3.0}
    assert "q_proj" in found["lora_target_modules"]
    given = {"additional_config": {"other": 1}}
    found = arguments({"target_modules": ["o_proj"]}, engine_args=given)
    assert found["lora_target_modules"] == ["o_proj"]
    assert found["additional_config"] == {"other": 1, SCALE: 2.0}
    plain = engine_args(
        GenerationConfig(max_new_tokens=4), model_name="model", on_gpu=False
    )
    assert "enable_lora" not in plain
    with pytest.raises(ConfigError, match=r"'enable_lora': set policy\.lora\.sync"):
        arguments({}, engine_args={"enable_lora": True})


@pytest.mark.parametrize(
    ("lora", "overrides", "message"),
    [
        ({"r": 600}, {}, r"lora\.r must be at most 512 .* got 600; use 512, or set"),
        ({}, {"model_type": "mixtral"}, "one of the families .* got 'mixtral'; use"),
    ],
)
def test_adapters_that_vllm_cannot_take(tiny_folder, lora, overrides, message):
    config = PolicyConfig(
        model_name=str(tiny_folder),
        lora={**LORA, **lora},
        hf_config_overrides=overrides,
        generation={"backend": "vllm", "max_new_tokens": 4},
    )
    with pytest.raises(ConfigError, match=message):
        check_policy(config, 1)
    check_policy(config.replace(lora={**LORA, **lora, "sync": "merged"}), 1)
