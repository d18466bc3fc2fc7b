"""Memory falls where it is released, and no call is made needlessly."""

from __future__ import annotations

import psutil
import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import WorkerDiedError
from rl_models import GenerationConfig, GenerationPolicy, PolicyConfig, TrainingPolicy
from rl_models.backend_forms import with_defaults
from rl_models.build.model import ModelBuildConfig, build_model
from rl_models.generation.traits import GenerationTraits, get_generation_traits
from rl_models.generation.vllm.backend import VllmGenerationBackend
from rl_models.policy.hosting import hosting_of

ROWS, WIDTH, HIDDEN = 256, 400, 128
CACHE_BYTES = 2 * ROWS * WIDTH * HIDDEN * 4
"""Keys and values of one layer, as float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = ModelBuildConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=WIDTH + 8,
    )
    return build_model(config, tmp_path_factory.mktemp("model") / "wide")


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([1], max_colocated_worker_groups=2) as made:
        yield made


@pytest.fixture(scope="module")
def generator(cluster, folder):
    config = GenerationConfig(max_new_tokens=1, num_threads=1)
    made = GenerationPolicy(cluster, config, model_name=folder)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def policy(cluster, folder):
    config = PolicyConfig.from_dict(
        {
            "model_name": str(folder),
            "precision": "float32",
            "num_threads": 1,
            "generation": {"max_new_tokens": 1},
        }
    )
    made = TrainingPolicy(cluster, config)
    yield made
    made.shutdown()


def sample(model):
    """Fill a cache: all rows share a prompt, which is computed once and copied."""
    rows = BatchedDataDict(
        input_ids=torch.full((ROWS, WIDTH), 3),
        input_lengths=torch.full((ROWS,), WIDTH),
        seeds=torch.arange(ROWS),
    )
    return model.generate(rows)


def resident_bytes(model):
    return psutil.Process(model.group.worker_pids[0]).memory_info().rss


def record_calls(model, monkeypatch):
    """Record the worker methods called from now on."""
    methods = []
    for name in ("run_all_workers_single_data", "run_single_worker_single_data"):
        call = getattr(model.group, name)

        def noted(method, *arguments, _call=call, **settings):
            methods.append(method)
            return _call(method, *arguments, **settings)

        monkeypatch.setattr(model.group, name, noted)
    return methods


def test_a_generator_gives_the_memory_of_its_cache_back(generator, monkeypatch):
    first = sample(generator)
    held = resident_bytes(generator)
    methods = record_calls(generator, monkeypatch)
    generator.finish_generation()
    assert methods == ["release_memory"]
    assert resident_bytes(generator) < held - 0.8 * CACHE_BYTES
    generator.prepare_for_generation()
    assert methods == ["release_memory"], "a replica takes memory by itself"
    again = sample(generator)
    assert torch.equal(first["output_ids"], again["output_ids"])


def test_a_policy_that_samples_frees_its_cache_before_it_trains(policy, monkeypatch):
    methods = record_calls(policy, monkeypatch)
    policy.finish_training()
    policy.prepare_for_training()
    assert methods == [], "a CPU has nothing to free"
    sample(policy)
    held = resident_bytes(policy)
    policy.prepare_for_training()
    policy.prepare_for_training()
    assert methods == ["prepare_for_training"]
    assert resident_bytes(policy) < held - 0.8 * CACHE_BYTES


def test_a_lost_replica_does_not_end_the_turn(generator, monkeypatch):
    """It holds no memory, and is restored like one that is lost while sampling."""
    lost = []
    monkeypatch.setattr(generator.replicas, "lose", lambda *found: lost.append(found))

    def gone(*arguments, **settings):
        raise WorkerDiedError("the process is gone")

    monkeypatch.setattr(generator.workers, "call", gone)
    generator.finish_generation()
    assert [replica for replica, _ in lost] == [0]


@pytest.mark.parametrize(
    ("backend", "vllm", "on_gpu", "frees"),
    [
        ("huggingface", {}, False, True),
        ("huggingface", {}, True, True),
        ("vllm", {}, False, False),
        ("vllm", {}, True, False),
        ("vllm", {"enable_sleep_mode": True}, True, True),
    ],
)
def test_backends_say_whether_they_free_memory(backend, vllm, on_gpu, frees):
    config = GenerationConfig.from_dict(
        {"max_new_tokens": 1, "backend": backend, "vllm": vllm}
    )
    traits = get_generation_traits(backend)
    assert hosting_of(traits, config, on_gpu=on_gpu).frees_memory is frees


def test_a_backend_with_nothing_to_free_is_not_called():
    class Keeps:
        """Has no `release_memory`."""

    class Frees(Keeps):
        def release_memory(self): ...

    config = GenerationConfig(max_new_tokens=1)
    keeps, frees = (with_defaults(c, GenerationTraits) for c in (Keeps, Frees))
    assert not hosting_of(keeps, config, on_gpu=False).frees_memory
    assert hosting_of(frees, config, on_gpu=False).frees_memory


class SleepingEngine:
    """Records when it is put to sleep and woken, as vLLM would be."""

    def __init__(self):
        self.calls = []

    def sleep(self):
        self.calls.append("sleep")

    def wake(self, parts):
        self.calls.append(f"wake {'+'.join(parts)}")

    def load(self, tensors, version):
        self.calls.append("load")

    def changed(self, entries):
        self.calls.append("changed")
        return []


def test_weights_of_a_sleeping_engine_are_updated_before_its_cache_is_back():
    """The trainer's memory is needed until the update ends."""
    backend = VllmGenerationBackend()
    backend.config = GenerationConfig.from_dict(
        {"max_new_tokens": 1, "vllm": {"enable_sleep_mode": True}}
    )
    backend._engine = engine = SleepingEngine()
    backend.release_memory()
    backend.release_memory()
    assert engine.calls == ["sleep"]
    backend.load_weights(iter(()), 1)
    backend.load_weights(iter(()), 2)
    assert engine.calls[1:] == ["wake weights", "load", "load"]
    backend.wake("weights", "kv_cache")
    backend.wake("weights", "kv_cache")
    assert engine.calls[4:] == ["wake kv_cache"]
    backend.release_memory()
    backend.load_weights(iter(()), 3)
    engine.calls.clear()
    backend.release_memory()
    assert engine.calls == ["wake kv_cache", "sleep"]
