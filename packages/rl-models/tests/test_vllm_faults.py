"""Faults of replicas with the real vLLM engine, and of the weights sent to them."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from contextlib import suppress

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.testing import TokenCrossEntropy, build_tiny_model, reference_logprobs
from rl_models.types import SamplingParams
from rl_models.weights.config import WeightSyncConfig
from rl_models.weights.sync import WeightSynchronizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trainer(ray_cluster, vllm_folder):
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        made = HuggingFacePolicy(
            vllm_folder,
            cluster,
            max_total_sequence_length=256,
            optimizer={"kwargs": {"lr": 1e-2}},
        )
        yield made
        made.shutdown()  # the last test has killed it


def make_sync(trainer, policy, **settings):
    common = {"bucket_bytes": 8192, "deadline_s": 60, "probe": {"period": 1}}
    config = WeightSyncConfig(**common, **settings)
    return WeightSynchronizer(trainer, policy, config)


@pytest.fixture
def sync(trainer, vllm_policy):
    """Give both replicas the trainer's weights."""
    assert vllm_policy.replicas.settle() == [0, 1]
    made = make_sync(trainer, vllm_policy)
    made.sync_weights()
    assert vllm_policy.replicas.serving == [0, 1]
    return made


def make_rows(num_rows=512):
    generator = torch.Generator().manual_seed(1)
    return BatchedDataDict(
        input_ids=torch.randint(3, 13, (num_rows, 9), generator=generator),
        input_lengths=torch.full((num_rows,), 9),
        seeds=torch.arange(num_rows),
    )


def learn(trainer):
    """Take one optimizer step that moves every weight."""
    mask = torch.ones(4, 12)
    mask[:, 0] = 0
    rows = BatchedDataDict(
        input_ids=torch.randint(3, 13, (4, 12)),
        input_lengths=torch.full((4,), 12),
        token_mask=mask,
        sample_mask=torch.ones(4),
    )
    trainer.train(rows, TokenCrossEntropy())


def check_rows(output, trainer, version):
    """Check that every token has this version, and the trainer's log-prob."""
    assert set(output["token_versions"].unique().tolist()) == {-1, version}
    rows = BatchedDataDict(
        input_ids=output["output_ids"],
        input_lengths=output["unpadded_sequence_lengths"],
    )
    apart = trainer.get_logprobs(rows)["logprobs"] - output["logprobs"]
    assert apart[output["token_versions"] == version].abs().max() < 1e-5


def check_refusal(policy, in_replica, message):
    """Check that neither the policy nor a replica generates, whichever is called."""

    def generate(worker, rows):
        return worker.generate(rows)

    with pytest.raises(GenerationError, match="last weight update failed"):
        policy.generate(make_rows(4))
    for replica in (0, 1):
        with pytest.raises(GenerationError, match=message):
            in_replica(replica, generate, make_rows(4))


class Faulty:
    """A trainer whose syncs fail as these functions specify."""

    def __init__(self, trainer, *, request=lambda request: request, export=None):
        self.trainer = trainer
        self.request = request
        self.export = export or (lambda export: export)

    def __getattr__(self, name):
        return getattr(self.trainer, name)

    def start_weight_export(self, request, link=None):
        return self.export(
            self.trainer.start_weight_export(self.request(request), link)
        )


def killing(process):
    """Return a function for `Faulty` that kills a process after messages were sent."""

    def export(export):
        with suppress(ProcessLookupError):  # on the second attempt
            os.kill(process, signal.SIGKILL)
        return export

    return export


def test_a_stopped_replica_is_noticed_and_serves_once_it_has_the_weights(
    sync, trainer, vllm_policy, in_replica, signal_in_generation
):
    def generate(worker, rows):
        return worker.generate(rows)

    version = vllm_policy.weight_version
    expected = vllm_policy.generate(make_rows())
    with signal_in_generation(vllm_policy, 1, signal.SIGSTOP):
        output = vllm_policy.generate(make_rows())
    assert torch.equal(output["output_ids"], expected["output_ids"])
    check_rows(output, trainer, version)
    assert vllm_policy.replicas.serving == [0]
    assert vllm_policy.replicas.settle() == [0, 1]
    assert vllm_policy.replicas.serving == [0]
    with pytest.raises(GenerationError, match="replica 1 has no weights"):
        in_replica(1, generate, make_rows(4))
    learn(trainer)
    assert sync.sync_weights() == version + 1
    assert vllm_policy.replicas.serving == [0, 1]
    check_rows(vllm_policy.generate(make_rows(64)), trainer, version + 1)


def test_a_replica_whose_engine_stalls_is_ended_and_its_rows_go_elsewhere(
    sync, trainer, vllm_policy, in_replica
):
    def block(worker):
        """Block the engine indefinitely after some steps; the rest keeps running."""
        import threading  # noqa: PLC0415

        core = worker._backend.engine._llm.llm_engine.engine_core.engine_core
        model = core.model_executor.driver_worker
        execute = model.execute_model
        left = iter(range(12))

        def execute_or_wait(step):
            if next(left, None) is None:
                threading.Event().wait()
            return execute(step)

        model.execute_model = execute_or_wait

    expected = vllm_policy.generate(make_rows())
    pids = vllm_policy.group.worker_pids
    in_replica(1, block)
    output = vllm_policy.generate(make_rows())
    assert torch.equal(output["output_ids"], expected["output_ids"])
    check_rows(output, trainer, vllm_policy.weight_version)
    assert vllm_policy.replicas.settle() == [0, 1]
    assert vllm_policy.group.worker_pids[0] == pids[0]
    assert vllm_policy.group.worker_pids[1] != pids[1]


def test_replicas_that_are_killed_in_a_sync_and_in_generation_get_the_weights_again(
    sync, trainer, vllm_policy, signal_in_generation
):
    learn(trainer)
    fatal = killing(vllm_policy.group.worker_pids[0])
    sync = make_sync(Faulty(trainer, export=fatal), vllm_policy)
    version = sync.sync_weights()
    assert vllm_policy.replicas.serving == [1]
    expected = vllm_policy.generate(make_rows())
    check_rows(expected, trainer, version)
    # No replica serves now; the other has lost its weights, and gets the same again.
    with signal_in_generation(vllm_policy, 1, signal.SIGKILL):
        output = vllm_policy.generate(make_rows())
    assert torch.equal(output["output_ids"], expected["output_ids"])
    check_rows(output, trainer, version)
    assert vllm_policy.weight_version == version


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"request": lambda r: dataclasses.replace(r, precision="bfloat16")},
            "came as bfloat16",
        ),
        (
            {"export": lambda e: dataclasses.replace(e, messages=e.messages[:1])},
            "end before the end",
        ),
    ],
    ids=["wrong dtype", "truncated"],
)
def test_weights_that_did_not_come_right_are_never_served(
    sync, trainer, vllm_policy, in_replica, fault, message
):
    version = vllm_policy.weight_version
    faulty = Faulty(trainer, **fault)
    with pytest.raises(WeightSyncError, match=f"replica 0.*{message}.*replica 1"):
        make_sync(faulty, vllm_policy, transport="object_store").sync_weights()
    check_refusal(vllm_policy, in_replica, "does not serve")
    assert vllm_policy.weight_version == version
    make_sync(trainer, vllm_policy).sync_weights()
    check_rows(vllm_policy.generate(make_rows(64)), trainer, version + 1)


@pytest.fixture(scope="module")
def async_replica(vllm_policy, in_replica, vllm_folder):
    """Switch replica 1 to `AsyncLLM` in its existing process."""

    def begin(worker, config, folder):
        worker.setup(1, config, {"model_name": folder})

    assert vllm_policy.replicas.settle() == [0, 1]
    engine = vllm_policy.config.vllm.model_copy(update={"async_engine": True})
    config = vllm_policy.config.model_copy(update={"vllm": engine})
    in_replica(1, begin, config.to_dict(), str(vllm_folder))
    return 1


def test_tokens_before_an_update_are_of_the_old_weights_and_later_of_the_new(
    async_replica, in_replica, vllm_folder, tmp_path
):
    other = build_tiny_model(tmp_path / "other", seed=5, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    weights = [(name, value.detach()) for name, value in model.named_parameters()]

    def update_in_flight(worker, rows, sampling, weights):
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

        backend = worker._backend
        states = backend.engine._llm.output_processor.request_states
        stop_token_ids, backend._stop_token_ids = backend._stop_token_ids, []
        pause = threading.Event()
        end = time.monotonic() + 60
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(backend.generate, rows, sampling=sampling)
            while not any(
                state.detokenizer.num_output_tokens() > 5
                for state in list(states.values())
            ):
                # No assert: pytest's own would not reach the process.
                if time.monotonic() > end:
                    raise TimeoutError("no row has six tokens yet")
                pause.wait(0.005)
            backend.load_weights(iter(weights), 7)
            output = future.result(timeout=60)
        backend._stop_token_ids = stop_token_ids
        return output, backend.generate(rows)

    sampling = SamplingParams(max_new_tokens=400)
    output, after = in_replica(
        async_replica, update_in_flight, make_rows(8), sampling, weights
    )
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


def test_a_replica_ends_with_the_process_of_its_engine_and_is_replaced(
    async_replica, sync, trainer, vllm_policy, in_replica, signal_in_generation
):
    def changed(worker):
        return worker.changed_weights()

    assert in_replica(async_replica, changed) == []
    version = vllm_policy.weight_version
    expected = vllm_policy.generate(make_rows())
    check_rows(expected, trainer, version)
    process = psutil.Process(vllm_policy.group.worker_pids[async_replica])
    below = process.children(recursive=True)
    (engine,) = [each for each in below if "EngineCore" in each.name()]
    with signal_in_generation(vllm_policy, async_replica, signal.SIGKILL, engine.pid):
        output = vllm_policy.generate(make_rows())
    assert torch.equal(output["output_ids"], expected["output_ids"])
    check_rows(output, trainer, version)
    assert psutil.wait_procs([process, *below], timeout=20)[1] == []
    assert vllm_policy.replicas.settle() == [0, 1]


def test_a_trainer_that_dies_during_a_sync_is_named(
    sync, trainer, vllm_policy, in_replica
):
    fatal = killing(trainer.group.worker_pids[0])
    dying = make_sync(Faulty(trainer, export=fatal), vllm_policy)
    with pytest.raises(WeightSyncError, match=r"worker 0 of group 'policy'.*SIGKILL"):
        dying.sync_weights()
    check_refusal(vllm_policy, in_replica, "does not serve")
