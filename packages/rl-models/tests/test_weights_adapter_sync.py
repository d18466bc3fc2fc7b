"""Adapters sent alone between workers: the base goes where it is missing."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.batch.tensor_buffers import decode
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_models.generation.config import GenerationConfig
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.testing import TokenCrossEntropy
from rl_models.weights.config import WeightSyncConfig
from rl_models.weights.sync import WeightSynchronizer

LORA = {"r": 2, "sync": "adapter"}


def rows(num_rows=6, width=12, seed=0):
    """Return rows of one length, trained on except for their first token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(num_rows, width)
    mask[:, 0] = 0
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, 16, (num_rows, width), generator=generator),
            "input_lengths": torch.full((num_rows,), width),
            "token_mask": mask,
            "sample_mask": torch.ones(num_rows),
        }
    )


def prompts():
    data = rows(width=9)
    return BatchedDataDict(
        {
            "input_ids": data["input_ids"],
            "input_lengths": data["input_lengths"],
            "seeds": torch.arange(6),
        }
    )


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4) as made:
        yield made


@pytest.fixture(scope="module")
def trainer(cluster, tiny_folder):
    """Two ranks that share the model."""
    made = HuggingFacePolicy(
        tiny_folder,
        cluster,
        max_total_sequence_length=64,
        lora=LORA,
        optimizer={"kwargs": {"lr": 1e-2}},
    )
    yield made
    assert made.shutdown()


@pytest.fixture(scope="module")
def generation(cluster, tiny_folder, trainer):
    config = GenerationConfig(
        max_new_tokens=8,
        stop_token_ids=[],
        max_restarts=10,
        start_deadline_s=120,
        call_deadline_s=60,
    )
    made = GenerationPolicy(
        cluster,
        config,
        model_name=tiny_folder,
        load_weights=False,
        adapter=trainer.config.sent_adapter,
    )
    yield made
    assert made.shutdown()


class Counting:
    """A trainer that counts the bytes of its messages."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.sent = []

    def __getattr__(self, name):
        return getattr(self.trainer, name)

    def start_weight_export(self, request, link=None):
        export = self.trainer.start_weight_export(request, link)
        calls = export.messages if link is None else ()
        if request.turns:
            calls = [call for of_rank in calls for call in of_rank]
        parts = ray.get(list(calls), timeout=60)
        blocks = [block for part in parts for _, block in part if block is not None]
        num_bytes = sum(decode(block).nbytes for block in blocks)
        self.sent.append((request.kind, num_bytes))
        return export


def disagreement(trainer, generation):
    """Return the largest log-prob difference on rows sampled by the replicas."""
    output = generation.generate(prompts())
    data = BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": output["unpadded_sequence_lengths"],
        }
    )
    logprobs = trainer.get_logprobs(data)["logprobs"]
    return (logprobs - output["logprobs"])[:, 9:].abs().max().item()


def synchronizer(trainer, generation, **settings):
    settings = {"bucket_bytes": 8192, "deadline_s": 60.0, **settings}
    return WeightSynchronizer(trainer, generation, WeightSyncConfig(**settings))


@pytest.mark.parametrize("transport", ["object_store", "shared_memory"])
def test_replicas_are_sent_the_base_once(trainer, generation, transport):
    source = Counting(trainer)
    sync = synchronizer(source, generation, transport=transport)
    for seed in range(3):
        trainer.train(rows(seed=seed), TokenCrossEntropy())
        version = sync.sync_weights()
        assert version == generation.weight_version
        assert disagreement(trainer, generation) < 1e-5
    assert [kind for kind, _ in source.sent] == ["apart", "adapter", "adapter"]
    trainer.train(rows(seed=3), TokenCrossEntropy())
    assert disagreement(trainer, generation) > 1e-3
    sync.close()
    if transport == "object_store":
        sizes = [size for _, size in source.sent]
        wanted = adapter_bytes(trainer)
        assert sizes[1] == sizes[2]
        # Tensors are aligned within a block.
        assert wanted <= sizes[1] < 1.2 * wanted
        assert sizes[1] < sizes[0] / 3


def adapter_bytes(trainer):
    """Return the adapter's bytes in float32: r (in + out) numbers per matrix."""
    config = trainer.config
    model = AutoModelForCausalLM.from_pretrained(config.model_name)
    return 4 * sum(
        config.lora.r * (module.in_features + module.out_features)
        for module in model.model.modules()
        if isinstance(module, torch.nn.Linear)
    )


def test_a_replica_that_was_started_again_gets_base_and_adapter(trainer, generation):
    source = Counting(trainer)
    sync = synchronizer(source, generation)
    trainer.train(rows(seed=4), TokenCrossEntropy())
    sync.sync_weights()
    sync.sync_weights()
    for number in generation.group.worker_pids:
        os.kill(number, signal.SIGKILL)
    # All are lost: those that return get the served version.
    assert disagreement(trainer, generation) < 1e-5
    trainer.train(rows(seed=5), TokenCrossEntropy())
    sync.sync_weights()
    assert disagreement(trainer, generation) < 1e-5
    kinds = [kind for kind, _ in source.sent]
    assert kinds[:3] == ["apart", "adapter", "apart"]
    assert kinds[-1] == "adapter"
    # One replica may have served alone until now.
    assert generation.replicas.settle() == [0, 1]
    sync.close()


def test_weights_of_a_checkpoint_are_another_base(trainer, generation, tmp_path):
    source = Counting(trainer)
    # A policy that starts over has left the link of a synchronizer.
    sync = synchronizer(source, generation, transport="object_store")
    trainer.train(rows(seed=6), TokenCrossEntropy())
    sync.sync_weights()
    trainer.save_checkpoint(tmp_path / "w", tmp_path / "o")
    before = generation.generate(prompts())
    # Merged weights as the base, beneath adapters that are zero again.
    trainer.load_checkpoint(tmp_path / "w")
    sync.sync_weights()
    merged = generation.generate(prompts())
    trainer.reload(trainer.config, optimizer_path=tmp_path / "o")
    sync.sync_weights()
    after = generation.generate(prompts())
    assert [kind for kind, _ in source.sent] == ["apart"] * 3
    for output in (merged, after):
        assert torch.equal(output["output_ids"], before["output_ids"])
        torch.testing.assert_close(
            output["logprobs"], before["logprobs"], atol=1e-5, rtol=0
        )
    assert disagreement(trainer, generation) < 1e-5
    sync.close()


def test_a_generator_without_adapters_is_refused(trainer, generation):
    plain = SimpleNamespace(weight_version=0, start_weight_update=None)
    with pytest.raises(ConfigError, match="got a generator that has no adapter"):
        WeightSynchronizer(trainer, plain)
    merging = SimpleNamespace(start_weight_export=None)
    with pytest.raises(ConfigError, match="got a policy that has no adapter"):
        WeightSynchronizer(merging, generation)
