"""One replica whose model is sharded over two workers, with the real engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_models import PolicyConfig, VllmGeneration
from rl_models.errors import WeightSyncError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.replica_rank import ReplicaRank
from rl_models.generation.vllm.engine_args import engine_args, engine_variables
from rl_models.generation.vllm.model_shards import check_shards
from rl_models.generation.vllm_config import VllmConfig
from rl_models.replicas.workers import replica_layout
from rl_models.testing import build_tiny_model, reference_logprobs
from rl_models.training.worker import TrainingWorker
from rl_models.types import SamplingParams
from rl_models.weight_request import Pending
from rl_models.weights.sync import WeightSynchronizer

CONFIG = GenerationConfig(
    backend="vllm",
    max_new_tokens=24,
    stop_token_ids=[],
    vllm={"kv_cache_gib": 0.125, "max_num_seqs": 32, "tensor_parallel_size": 2},
)
ASYNC = CONFIG.model_copy(
    update={"vllm": CONFIG.vllm.model_copy(update={"async_engine": True})}
)
PLACE = ReplicaRank(1, 2, "127.0.0.1", 4242)


class Trainer:
    """One rank of a local trainer, with other weights than the replica."""

    def __init__(self, folder):
        self.config = PolicyConfig(model_name=str(folder), max_total_sequence_length=64)
        self.worker = TrainingWorker(self.config.to_dict())
        self.worker.setup()

    def start_weight_export(self, request, link=None):
        assert link is None
        messages = self.worker.export_weights(request, 0, is_last=True)
        return Pending(lambda left_s: [None], (messages,))

    def get_logprobs(self, rows):
        return self.worker.get_logprobs(rows, micro_batch_size=8)


@pytest.fixture(scope="module")
def policy(ray_cluster, tiny_folder):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        made = VllmGeneration(cluster, CONFIG, model_name=tiny_folder)
        yield made
        assert made.shutdown()


def make_rows(num_rows):
    generator = torch.Generator().manual_seed(1)
    return BatchedDataDict(
        input_ids=torch.randint(3, 13, (num_rows, 9), generator=generator),
        input_lengths=torch.full((num_rows,), 9),
        seeds=torch.arange(num_rows),
    )


def apart(folder, output):
    truth = reference_logprobs(folder, output["output_ids"])
    sampled = output["token_versions"] >= 0
    return (output["logprobs"].double() - truth)[sampled].abs().max()


@pytest.mark.slow
def test_two_workers_are_one_replica_that_is_updated_and_lost_as_a_whole(
    policy, tiny_folder, tmp_path
):
    assert policy.num_replicas == 1
    grid = policy.group.sharding_annotations
    assert grid.get_ranks_by_coord(data_parallel=0) == [0, 1]
    assert [seat.tied_group for seat in policy.group.seats] == [0, 0]
    first = policy.generate(make_rows(24))
    assert apart(tiny_folder, first) < 1e-5

    other = build_tiny_model(tmp_path / "other", seed=5)
    sync = WeightSynchronizer(Trainer(other), policy, CONFIG.weight_sync)
    assert sync.sync_weights() == 1
    expected = policy.generate(make_rows(256))
    assert expected["token_versions"].unique().tolist() == [-1, 1]
    assert apart(other, expected) < 1e-5
    assert apart(tiny_folder, expected) > 1e-2
    assert policy.changed_weights(0) == []

    # Rank 1 answers nothing on its own; rank 0 can only wait for it.
    pids = policy.group.worker_pids

    def kill():
        end = time.monotonic() + 30
        pause = threading.Event()
        while policy.group.health()[1].method != "generate":
            assert time.monotonic() < end
            pause.wait(0.02)
        os.kill(pids[1], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    output = policy.generate(make_rows(256))
    thread.join()
    assert torch.equal(output["output_ids"], expected["output_ids"])
    assert torch.equal(output["logprobs"], expected["logprobs"])
    assert output["weight_version"].unique().tolist() == [1]
    assert [policy.group.incarnation(rank) for rank in (0, 1)] == [1, 1]
    assert not set(pids) & set(policy.group.worker_pids)
    assert policy.replicas.serving == [0]


@pytest.mark.slow
def test_the_same_processes_take_another_model(policy, vllm_folder):
    pids = policy.group.worker_pids
    policy.reload(CONFIG, model_name=vllm_folder)
    assert apart(vllm_folder, policy.generate(make_rows(8))) < 1e-5
    assert policy.group.worker_pids == pids


def wait_for_tokens(policy, count):
    """Wait until the leader has that number of tokens of some row."""

    def tokens(host):
        processor = host._worker._backend.engine._llm.output_processor
        return [
            state.detokenizer.num_output_tokens()
            for state in list(processor.request_states.values())
        ]

    end = time.monotonic() + 60
    pause = threading.Event()
    leader = policy.group.workers[0]
    while max(ray.get(leader.__ray_call__.remote(tokens)), default=0) < count:
        assert time.monotonic() < end
        pause.wait(0.005)


def refuse_weights_once(policy, rank):
    """Make a worker's next weights end too early."""

    def refuse(host, message):
        from rl_models.errors import WeightSyncError  # noqa: PLC0415

        receiver = host._worker._receiver
        receive = receiver.weights

        def some(source, request):
            receiver.weights = receive
            weights = receive(source, request)
            for _ in range(3):
                yield next(weights)
            raise WeightSyncError(message)

        receiver.weights = some

    worker = policy.group.workers[rank]
    ray.get(worker.__ray_call__.remote(refuse, f"rank {rank} got half"))


def in_engine(policy, rows):
    """Return what the engine samples, whether or not it may be served."""

    def generate(host, rows):
        backend = host._worker._backend
        backend._has_weights = True
        return backend.generate(rows)

    return ray.get(policy.group.workers[0].__ray_call__.remote(generate, rows))


@pytest.mark.matrix
@pytest.mark.slow
def test_all_ranks_of_an_async_engine_switch_between_the_same_two_tokens(
    policy, vllm_folder, tmp_path, signal_in_generation
):
    policy.reload(ASYNC, model_name=vllm_folder, updates_in_flight=True)
    assert policy.updates_in_flight
    folders = {
        0: vllm_folder,
        1: build_tiny_model(tmp_path / "1", seed=5, max_position_embeddings=512),
    }
    sync = WeightSynchronizer(Trainer(folders[1]), policy, CONFIG.weight_sync)
    sampling = SamplingParams(max_new_tokens=400)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(policy.generate, make_rows(8), sampling=sampling)
        wait_for_tokens(policy, 6)
        assert sync.sync_weights() == 1
        output = call.result(timeout=100)
    versions = output["token_versions"]
    assert set(versions.unique().tolist()) == {-1, 0, 1}
    assert (versions[:, 9:409].diff(dim=1) >= 0).all()
    for version, folder in folders.items():
        truth = reference_logprobs(folder, output["output_ids"])
        differences = (output["logprobs"].double() - truth)[versions == version]
        assert differences.abs().max() < 1e-5
    assert policy.changed_weights(0) == []

    # If one rank lacks them, none loads.
    refuse_weights_once(policy, 1)
    sync = WeightSynchronizer(Trainer(vllm_folder), policy, CONFIG.weight_sync)
    with pytest.raises(WeightSyncError, match="rank 1 got half"):
        sync.sync_weights()
    assert policy.changed_weights(0) == []
    assert apart(folders[1], in_engine(policy, make_rows(4))) < 1e-5
    version = sync.sync_weights()
    expected = policy.generate(make_rows(256))
    assert expected["token_versions"].unique().tolist() == [-1, version]
    assert apart(vllm_folder, expected) < 1e-5

    pids = policy.group.worker_pids
    processes = [psutil.Process(pid) for pid in pids]
    processes += processes[0].children(recursive=True)
    with signal_in_generation(policy, 0, signal.SIGKILL, pids[1]):
        output = policy.generate(make_rows(256))
    assert torch.equal(output["output_ids"], expected["output_ids"])
    assert torch.equal(output["token_versions"], expected["token_versions"])
    assert not set(pids) & set(policy.group.worker_pids)
    assert psutil.wait_procs(processes, timeout=60)[1] == []


def test_each_rank_has_an_engine_of_its_own():
    arguments = engine_args(CONFIG, model_name="m", place=PLACE, on_gpu=False)
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["distributed_executor_backend"].endswith(".RankExecutor")
    assert "disable_custom_all_reduce" not in arguments
    led = engine_args(ASYNC, model_name="m", place=PLACE, on_gpu=False)
    assert led["distributed_executor_backend"].endswith(".LeadingExecutor")
    gpu = engine_args(CONFIG, model_name="m", place=PLACE, on_gpu=True)
    assert gpu["disable_custom_all_reduce"]
    assert gpu["compilation_config"]["pass_config"] == {"fuse_allreduce_rms": False}
    variables = engine_variables(CONFIG, on_gpu=True)
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    for name in ("SYMM_MEM", "FLASHINFER"):
        assert variables[f"VLLM_ALLREDUCE_USE_{name}"] == "0"
    with pytest.raises(ConfigError, match="must be 1 in a process by itself: got 2"):
        engine_args(CONFIG, model_name="m", on_gpu=True)


def test_what_cannot_be_cut_is_refused_before_anything_starts(tiny_folder):
    with pytest.raises(ConfigError, match=r"set vllm\.tensor_parallel_size"):
        VllmConfig(engine_args={"distributed_executor_backend": "mp"})
    check_shards(4, {"num_attention_heads": 8, "num_key_value_heads": 2})
    check_shards(2, {})
    for model_config, words in (
        ({"num_attention_heads": 6}, "divide num_attention_heads .*: got 4 with 6; u"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            "num_key_value_heads of the model: got 4 with 6; use 3",
        ),
        ({"text_config": {"intermediate_size": 9}}, "intermediate_size .*; use 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_shards(4, model_config)
    three = CONFIG.model_copy(update={"vllm": VllmConfig(tensor_parallel_size=3)})
    cluster = RayVirtualCluster([3], use_gpus=False)
    with pytest.raises(ConfigError, match="num_attention_heads of the model: got 3"):
        VllmGeneration(cluster, three, model_name=tiny_folder)
    with pytest.raises(ConfigError, match="bundles of the generation cluster: got 2 w"):
        VllmGeneration(cluster, CONFIG, model_name=tiny_folder)
    with pytest.raises(ConfigError, match=r"num_replicas .* by 3 for each: got 2 with"):
        replica_layout(cluster, 2, 3)
