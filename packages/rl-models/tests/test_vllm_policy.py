"""Workers with vLLM in its own environment, driven from one without it."""

from __future__ import annotations

import importlib.util

import pytest

from rl_distributed.actor_environments import EnvironmentStore, InstalledEnvironment
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ActorEnvironmentError, ConfigError
from rl_models import PolicyConfig, VllmGeneration
from rl_models.environments import VLLM
from rl_models.generation import choice
from rl_models.generation.config import GenerationConfig
from rl_models.generation.vllm import engine_variables
from rl_models.generation.vllm.engine_args import engine_args

ENGINE = {"kv_cache_gib": 0.125, "max_num_seqs": 16}


def make_config(**changes):
    settings = {"backend": "vllm", "max_new_tokens": 60, "stop_token_ids": []}
    return GenerationConfig(**{**settings, "vllm": ENGINE, **changes})


def test_the_driver_needs_no_vllm():
    assert importlib.util.find_spec("vllm") is None


def test_a_missing_environment_is_a_clear_error(ray_cluster, tiny_folder, monkeypatch):
    def no_way(self):
        return InstalledEnvironment(("no-such-package==1",), find_links=("/no/way",))

    monkeypatch.setattr(type(VLLM), "resolve", no_way)
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        pytest.raises(ActorEnvironmentError, match="no folder") as caught,
    ):
        VllmGeneration(cluster, make_config(), model_name=tiny_folder)
    assert "rl env build rl_models.generation.vllm" in caught.value.__notes__[-1]


def test_settings_without_effect_are_refused():
    arguments = {"model_name": "m", "on_gpu": False}
    for changes, message in (
        ({"backend_options": {"fused": False}}, "backend_options must be empty"),
        ({"max_batch_size": 4}, "max_num_seqs"),
        ({"vllm": {"tensor_parallel_size": 2}}, "by itself: got 2; use Generation"),
        ({"vllm": {"enable_sleep_mode": True}}, "enable_sleep_mode must be false"),
        ({"temperature": 0.005}, r"generation.temperature must be .* got 0.005"),
        ({"val_temperature": 1e-3}, r"generation.val_temperature .* got 0.001"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine_args(make_config(**changes), **arguments)
    for key, message in (
        ("max_num_seqs", "set vllm.max_num_seqs"),
        ("block_size", "set vllm.block_size"),
        ("pipeline_parallel_size", "rest on the value"),
        ("logprobs_mode", "log-probs and weight updates"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config(vllm={"engine_args": {key: 1}})


def test_engine_arguments():
    config = make_config(vllm={"engine_args": {"swap_space": 1}}, seed=2**63 - 1)
    cpu = engine_args(config, model_name="m", load_weights=False, on_gpu=False)
    assert cpu["load_format"] == "dummy"
    assert cpu["enforce_eager"]
    assert cpu["kv_cache_memory_bytes"] == 1 << 30
    assert cpu["swap_space"] == 1
    assert 0 <= cpu["seed"] < 1 << 31
    gpu = engine_args(config, model_name="m", on_gpu=True)
    assert gpu["load_format"] == "auto"
    assert gpu["kv_cache_memory_bytes"] is None
    assert "enable_chunked_prefill" not in gpu
    assert engine_variables(config, on_gpu=False)["OMP_NUM_THREADS"] == "1"
    apart = make_config(vllm={"async_engine": True})
    variables = engine_variables(apart, on_gpu=False)
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "TORCHDYNAMO_DISABLE" not in engine_variables(config, on_gpu=True)


def test_auto_takes_what_is_there(monkeypatch, tmp_path):
    auto = make_config(backend="auto")
    assert choice.choose_backend(auto, on_gpu=False).backend == "huggingface"
    monkeypatch.setattr(choice, "EnvironmentStore", lambda: EnvironmentStore(tmp_path))
    assert choice.choose_backend(auto, on_gpu=True).backend == "huggingface"
    monkeypatch.setattr(choice, "has_vllm", lambda: True)
    assert choice.choose_backend(auto, on_gpu=True).backend == "vllm"
    assert choice.choose_backend(make_config(), on_gpu=False).backend == "vllm"
    assert choice.for_this_process(make_config()).backend == "huggingface"


def test_vllm_generation_needs_a_section_and_a_model(tiny_folder):
    with pytest.raises(ConfigError, match="needs the section generation"):
        VllmGeneration(None, PolicyConfig(model_name=str(tiny_folder)))
    with pytest.raises(ConfigError, match="needs model_name"):
        VllmGeneration(None, make_config())
