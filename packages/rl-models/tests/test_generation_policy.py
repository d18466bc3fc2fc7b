from __future__ import annotations

import dataclasses

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError, ConfigError, RegistryError
from rl_distributed.virtual_cluster import RayVirtualCluster
from rl_models.errors import (
    ContextLengthError,
    GenerationError,
    ModelLoadError,
    WeightSyncError,
)
from rl_models.generation.config import GenerationConfig
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.policy.generation_worker import GenerationWorker
from rl_models.testing import build_tiny_model, reference_logprobs
from rl_models.types import SamplingParams
from rl_models.weights.manifest import WeightBundle
from rl_models.weights.sync import WeightSynchronizer

CONFIG = GenerationConfig(max_new_tokens=8, start_deadline_s=120, call_deadline_s=60)


class Trainer:
    """An actor that hands out the weights of a model folder."""

    def __init__(self, folder) -> None:
        # A local class travels by value: workers cannot import a test module.
        class Exporter:
            def __init__(self, folder: str) -> None:
                self.model = AutoModelForCausalLM.from_pretrained(folder)

            def export_weights(self, damage: bool) -> WeightBundle:
                bundle = WeightBundle.pack(self.model.named_parameters())
                if not damage:
                    return bundle
                buffers = {"float32": bundle.buffers["float32"].copy()}
                buffers["float32"][-1] += 1
                return dataclasses.replace(bundle, buffers=buffers)

        actor_class = ray.remote(num_cpus=0)(Exporter)
        self.actor = actor_class.remote(str(folder))
        self.damage = False

    def export_weights(self):
        return self.actor.export_weights.remote(self.damage)


def make_data(num_prompts=5, group=4):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 16, (num_prompts, 9), generator=generator)
    lengths = torch.randint(1, 10, (num_prompts,), generator=generator)
    ids[torch.arange(9) >= lengths[:, None]] = 0
    return BatchedDataDict(
        {
            "input_ids": ids.repeat_interleave(group, 0),
            "input_lengths": lengths.repeat_interleave(group),
            "seeds": torch.arange(num_prompts * group),
            "stop_strings": [["12"], None] * (num_prompts * group // 2),
        }
    )


def rows(output):
    lengths = output["unpadded_sequence_lengths"].tolist()
    return [
        ids[:length].tolist()
        for ids, length in zip(output["output_ids"], lengths, strict=True)
    ]


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as made:
        yield made


@pytest.fixture(scope="module")
def policy(cluster, tiny_folder):
    made = GenerationPolicy(cluster, CONFIG, model_name=tiny_folder)
    yield made
    assert made.shutdown()


def test_two_replicas_sample_what_one_process_samples(policy, tiny_folder):
    worker = GenerationWorker(CONFIG.to_dict(), {"model_name": str(tiny_folder)})
    worker.setup()
    data = make_data()
    for greedy in (False, True):
        shared = policy.generate(data, greedy)
        alone = worker.generate(data, greedy)
        assert rows(shared) == rows(alone)
        torch.testing.assert_close(
            shared["logprobs"], alone["logprobs"], atol=1e-5, rtol=0
        )
    assert policy.num_replicas == 2


def test_settings_of_a_call_reach_the_replicas(policy):
    params = SamplingParams(top_k=1, max_new_tokens=3)
    output = policy.generate(make_data(), sampling=params)
    assert output["generation_lengths"].max() <= 3
    best = policy.generate(make_data(), greedy=True)
    for sampled, greedy in zip(rows(output), rows(best), strict=True):
        assert greedy[: len(sampled)] == sampled


def test_one_row_and_no_seeds(policy):
    data = make_data(1, 1)
    del data["seeds"], data["stop_strings"]
    first, second = policy.generate(data), policy.generate(data)
    assert first["output_ids"].shape[0] == 1
    assert rows(first) != rows(second)


def test_bad_rows_are_refused(policy):
    data = make_data()
    with pytest.raises(BatchError, match="lacks input_lengths"):
        policy.generate(BatchedDataDict({"input_ids": data["input_ids"]}))
    with pytest.raises(ConfigError, match="temperature"):
        policy.generate(data, sampling=SamplingParams(temperature=-1.0))
    with pytest.raises(ContextLengthError, match="lower max_new_tokens"):
        policy.generate(data, sampling=SamplingParams(max_new_tokens=1000))


def test_weights_travel_between_actors_and_are_verified(policy, tmp_path):
    other = build_tiny_model(tmp_path, seed=5)
    trainer = Trainer(other)
    sync = WeightSynchronizer(trainer, policy)
    assert sync.is_stale
    assert sync.sync_weights(version=3) == policy.weight_version == 3
    assert not sync.is_stale
    output = policy.generate(make_data())
    assert output["weight_version"].unique().tolist() == [3]
    truth = reference_logprobs(other, output["output_ids"])
    sampled = output["logprobs"] != 0
    assert (output["logprobs"] - truth)[sampled].abs().max() < 1e-5

    sync.mark_stale()
    trainer.damage = True
    message = r"replica 0.*model\.norm\.weight.*replica 1"
    with pytest.raises(WeightSyncError, match=message):
        sync.sync_weights()
    assert sync.is_stale
    assert policy.weight_version == 3
    with pytest.raises(GenerationError, match="last weight update failed"):
        policy.generate(make_data())
    with pytest.raises(ConfigError, match="got 2 with version 3"):
        sync.sync_weights(version=2)
    trainer.damage = False
    assert sync.sync_weights() == 4
    assert rows(policy.generate(make_data())) == rows(output)
    ray.kill(trainer.actor)


def test_weights_of_another_model_name_tensor_and_replica(policy):
    version = policy.weight_version
    bundle = WeightBundle.pack([("model.norm.weight", torch.zeros(7))])
    with pytest.raises(
        WeightSyncError, match=r"replica 1.*embed_tokens.weight is miss"
    ):
        policy.update_weights([ray.put(bundle)], version + 1)


def test_what_can_be_known_is_refused_before_a_process_starts(cluster, tiny_folder):
    before = len(ray.util.list_named_actors(all_namespaces=True))
    with pytest.raises(RegistryError, match="huggingface"):
        GenerationPolicy(
            cluster,
            GenerationConfig(max_new_tokens=1, backend="hugingface"),
            model_name=tiny_folder,
        )
    with pytest.raises(ModelLoadError, match="does not exist"):
        GenerationPolicy(cluster, CONFIG, model_name="/no/such/folder")
    with pytest.raises(
        ConfigError, match=r"num_replicas must not exceed .* got 3 with 2"
    ):
        GenerationPolicy(
            cluster,
            GenerationConfig(max_new_tokens=1, num_replicas=3),
            model_name=tiny_folder,
        )
    assert len(ray.util.list_named_actors(all_namespaces=True)) == before
