from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    BatchError,
    ConfigError,
    RegistryError,
    WorkerDiedError,
)
from rl_models.errors import (
    ContextLengthError,
    ModelLoadError,
)
from rl_models.generation.config import GenerationConfig
from rl_models.generation.worker import GenerationWorker
from rl_models.policy import generation_replicas
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.policy.generation_replicas import GenerationReplicas
from rl_models.types import SamplingParams

CONFIG = GenerationConfig(max_new_tokens=8, start_deadline_s=120, call_deadline_s=60)


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
            "stop_strings": ([["12"], None] * num_prompts * group)[
                : num_prompts * group
            ],
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


class Group:
    """Workers that do nothing, in the place of those of Ray."""

    def __init__(self, cluster, builder, *, sharding_annotations, **settings):
        self.world_size = sharding_annotations.shape["data_parallel"]
        self.live_ranks = list(range(self.world_size))
        self.settings = settings
        self.is_shut_down = False

    def warn_of_crowding(self, num_threads, name):
        pass

    def ranks_without_node(self):
        return []

    def end(self, ranks, cause):
        pass

    def restart(self, ranks):
        pass

    def shutdown(self, **how):
        self.is_shut_down = True
        return True


@pytest.fixture
def idle_policy(monkeypatch, tiny_folder):
    monkeypatch.setattr(generation_replicas, "RayWorkerGroup", Group)
    monkeypatch.setattr(GenerationReplicas, "_set_up", lambda self, replicas: None)
    monkeypatch.setattr(GenerationReplicas, "_revive", lambda self, replica: True)
    bundles = SimpleNamespace(use_gpus=False, bundle_counts=[2])
    config = CONFIG.replace(max_restarts=0)
    return GenerationPolicy(bundles, config, model_name=tiny_folder)


def test_a_reload_without_room_leaves_what_is_served(idle_policy, tiny_folder):
    before, group = idle_policy.config, idle_policy.group
    idle_policy._served.version = 7
    idle_policy.restore_weights_by(restore := lambda: None)
    too_many = before.replace(num_replicas=3)
    with pytest.raises(ConfigError, match="must not exceed the bundles"):
        idle_policy.reload(too_many, model_name=tiny_folder, updates_in_flight=True)
    assert idle_policy.config == before
    assert not idle_policy.updates_in_flight
    assert idle_policy.weight_version == 7
    assert idle_policy._restore is restore
    assert idle_policy.group is group
    assert not group.is_shut_down


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_reload_brings_a_new_budget_of_restarts(
    idle_policy, tiny_folder, max_restarts
):
    group, config = idle_policy.group, CONFIG.replace(max_restarts=max_restarts)
    for _ in range(2):
        idle_policy.reload(config, model_name=tiny_folder)
        assert idle_policy.group is group, "nothing that it was made with differs"
        live = idle_policy.replicas.live
        idle_policy.replicas.lose(live[0], WorkerDiedError("killed"))
        if max_restarts == 0:
            assert idle_policy.replicas.settle() == [1]
            break
        assert idle_policy.replicas.settle() == [0, 1]


@pytest.mark.parametrize(
    ("name", "value", "reads"),
    [
        ("start_deadline_s", 7.0, lambda group: group["start_deadline_s"]),
        ("call_deadline_s", 8.0, lambda group: group["call_deadline_s"]),
        ("heartbeat_limit_s", 9.0, lambda g: g["failure_policy"].heartbeat_limit_s),
        ("on_node_lost", "fail", lambda g: g["failure_policy"].on_node_lost),
        ("min_replicas", 2, lambda g: g["failure_policy"].min_workers),
        ("node_deadline_s", 5.0, lambda g: g["failure_policy"].resources_deadline_s),
    ],
)
def test_a_reload_starts_workers_for_other_rules(
    idle_policy, tiny_folder, name, value, reads
):
    group = idle_policy.group
    config = idle_policy.config.replace(**{name: value})
    idle_policy.reload(config, model_name=tiny_folder)
    assert group.is_shut_down
    assert reads(idle_policy.group.settings) == value
    assert getattr(idle_policy.config, name) == value
