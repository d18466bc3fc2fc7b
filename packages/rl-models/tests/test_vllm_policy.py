"""Workers with vLLM in its own environment, driven from one that has none."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.actor_environments import EnvironmentStore, InstalledEnvironment
from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.errors import ActorEnvironmentError, ConfigError
from rl_distributed.virtual_cluster import RayVirtualCluster
from rl_distributed.workers import RayWorkerBuilder, RayWorkerGroup
from rl_models import PolicyConfig, VllmGeneration
from rl_models.environments import VLLM
from rl_models.generation import choice
from rl_models.generation.config import GenerationConfig
from rl_models.generation.vllm import VllmGenerationBackend, engine_variables
from rl_models.generation.vllm.engine_args import engine_args
from rl_models.testing import build_tiny_model, reference_logprobs

ENGINE = {"kv_cache_gib": 0.125, "max_num_seqs": 16}


def make_config(**changes):
    settings = {"backend": "vllm", "max_new_tokens": 60, "stop_token_ids": []}
    return GenerationConfig(**{**settings, "vllm": ENGINE, **changes})


def make_rows(num_rows):
    generator = torch.Generator().manual_seed(1)
    return BatchedDataDict(
        input_ids=torch.randint(3, 13, (num_rows, 9), generator=generator),
        input_lengths=torch.full((num_rows,), 9),
        seeds=torch.arange(num_rows),
    )


@pytest.mark.slow
def test_a_killed_replica_is_replaced_and_no_token_is_wrong(ray_cluster, tiny_folder):
    assert importlib.util.find_spec("vllm") is None
    config = PolicyConfig(model_name=str(tiny_folder), generation=make_config())
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        policy = VllmGeneration(cluster, config)
        try:
            rows = make_rows(256)
            expected = policy.generate(rows)

            def kill():
                end = time.monotonic() + 30
                pause = threading.Event()
                while policy.group.health()[1].method != "generate":
                    assert time.monotonic() < end
                    pause.wait(0.02)
                os.kill(policy.group.worker_pids[1], signal.SIGKILL)

            thread = threading.Thread(target=kill)
            thread.start()
            output = policy.generate(rows)
            thread.join()
            assert torch.equal(output["output_ids"], expected["output_ids"])
            assert policy.replicas.settle() == [0, 1]
            assert policy.group.incarnation(1) == 1
        finally:
            assert policy.shutdown()
    truth = reference_logprobs(tiny_folder, output["output_ids"])
    new = output["token_versions"] == 0
    assert (output["logprobs"].double() - truth)[new].abs().max() < 1e-5


@pytest.mark.slow
def test_tokens_before_an_update_are_of_the_old_weights_and_later_of_the_new(
    ray_cluster, vllm_folder, tmp_path
):
    other = build_tiny_model(tmp_path / "other", seed=5, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    weights = [(name, value.detach()) for name, value in model.named_parameters()]
    config = make_config(max_new_tokens=400, vllm={**ENGINE, "async_engine": True})

    class Host:
        def __init__(self, settings, folder):
            self.backend = VllmGenerationBackend()
            self.backend.setup(settings, model_name=folder)

        def update_in_flight(self, rows, weights):
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

            backend = self.backend
            states = backend.engine._llm.output_processor.request_states
            pause = threading.Event()
            end = time.monotonic() + 60
            with ThreadPoolExecutor(1) as pool:
                future = pool.submit(backend.generate, rows)
                while not any(
                    state.detokenizer.num_output_tokens() > 5
                    for state in list(states.values())
                ):
                    # No assert: pytest's own would not reach the process.
                    if time.monotonic() > end:
                        raise TimeoutError("no row has six tokens yet")
                    pause.wait(0.005)
                backend.load_weights(iter(weights), 7)
                return future.result(timeout=60), backend.generate(rows)

        def shutdown(self):
            self.backend.shutdown()

    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder(Host, config.to_dict(), str(vllm_folder)).with_options(
                environment=VLLM
            ),
            env_vars=engine_variables(config, on_gpu=False),
            start_deadline_s=300,
        ) as group,
    ):
        reference = group.run_single_worker_single_data(
            "update_in_flight", 0, rows=make_rows(8), weights=weights
        )
        ((output, after),) = group.get_all_worker_results([reference], deadline_s=150)
        assert group.shutdown(cleanup_method="shutdown")
    versions = output["token_versions"]
    assert output["weight_version"].tolist() == [0] * 8
    assert set(versions.unique().tolist()) == {-1, 0, 7}
    new_columns = versions[:, 9:409]
    assert (new_columns.diff(dim=1) >= 0).all()
    for version, folder in ((0, vllm_folder), (7, other)):
        truth = reference_logprobs(folder, output["output_ids"])
        apart = (output["logprobs"].double() - truth)[versions == version].abs()
        assert apart.max() < 1e-5
    assert after["weight_version"].tolist() == [7] * 8


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
    ):
        with pytest.raises(ConfigError, match=message):
            engine_args(make_config(**changes), **arguments)
    for key, message in (
        ("max_num_seqs", "set vllm.max_num_seqs"),
        ("logprobs_mode", "log-probs and weight updates"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config(vllm={"engine_args": {key: 1}})


def test_engine_arguments():
    config = make_config(vllm={"engine_args": {"swap_space": 1}}, seed=-1)
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
    assert "TORCHDYNAMO_DISABLE" not in engine_variables(config, on_gpu=True)


def test_auto_takes_what_is_there(monkeypatch, tmp_path):
    auto = make_config(backend="auto")
    assert choice.choose_backend(auto, on_gpu=False).backend == "huggingface"
    monkeypatch.setattr(choice, "EnvironmentStore", lambda: EnvironmentStore(tmp_path))
    assert choice.choose_backend(auto, on_gpu=True).backend == "huggingface"
    monkeypatch.setattr(choice, "_has_vllm", lambda: True)
    assert choice.choose_backend(auto, on_gpu=True).backend == "vllm"
    assert choice.choose_backend(make_config(), on_gpu=False).backend == "vllm"
    assert choice.for_this_process(make_config()).backend == "huggingface"


def test_vllm_generation_needs_a_section_and_a_model(tiny_folder):
    with pytest.raises(ConfigError, match="needs the section generation"):
        VllmGeneration(None, PolicyConfig(model_name=str(tiny_folder)))
    with pytest.raises(ConfigError, match="needs model_name"):
        VllmGeneration(None, make_config())
