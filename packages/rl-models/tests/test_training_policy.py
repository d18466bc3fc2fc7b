"""The policy on two worker processes, against one local rank."""

from __future__ import annotations

import pytest
import torch

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import BatchError, ConfigError, WorkerStartError
from rl_distributed.timing.timer import Timer
from rl_distributed.transfer import receive_tensors
from rl_models.config import PolicyConfig
from rl_models.errors import ContextLengthError, ModelLoadError
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.policy.preflight import check_policy
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.weight_request import WeightRequest
from rl_models.weights.receiving import MessageReceiver

SETTINGS = {
    "train_micro_batch_size": 3,
    "max_total_sequence_length": 32,
    "optimizer": {"kwargs": {"lr": 1e-3}},
    "scheduler": {"warmup_steps": 2},
}


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_ranks(cluster, tiny_model):
    # As for a large model on GPUs; other tests use the default for small ones.
    sharding = {"shard_layers": True, "reshard_after_forward": True}
    policy = HuggingFacePolicy(
        tiny_model, cluster, init_reference_model=True, dtensor=sharding, **SETTINGS
    )
    yield policy
    assert policy.shutdown()


def _one_rank(tiny_model, **setup):
    backend = DTensorTrainingBackend()
    config = PolicyConfig(model_name=str(tiny_model), **SETTINGS)
    backend.setup(config.to_dict(), **setup)
    return backend


def test_two_ranks_equal_one(two_ranks, tiny_model, make_batch, nll_loss, tmp_path):
    one = _one_rank(tiny_model)
    initial = two_ranks.get_logprobs(make_batch(15))["logprobs"]
    for step in range(5):
        data = make_batch(16, seed=step)
        expected = one.train_step(
            data, nll_loss, global_batch_size=16, micro_batch_size=16
        )
        result = two_ranks.train(data, nll_loss)
        for key in ("loss", "grad_norm", "lr"):
            torch.testing.assert_close(result[key], expected[key], atol=1e-5, rtol=0)
        total = sum(result["all_mb_metrics"]["loss"])
        assert total == pytest.approx(result["loss"].item(), abs=1e-6)
        assert sum(result["all_mb_metrics"]["rows"]) == 16
    # Several buckets, so that both ranks gather for each of them.
    request = WeightRequest(1, bucket_bytes=8192)
    export = two_ranks.start_weight_export(request)
    assert len(export.messages) > 3
    weights = receive_tensors(MessageReceiver(export.messages)).read()
    export.wait(60.0)
    assert set(weights) == set(one.model.parameters)
    for name, parameter in one.model.parameters.items():
        torch.testing.assert_close(weights[name], parameter, atol=1e-5, rtol=0)

    # An uneven number of rows for two ranks, in order, timed.
    data, timer = make_batch(15), Timer()
    got = two_ranks.get_logprobs(data, timer=timer)["logprobs"]
    torch.testing.assert_close(
        got, one.get_logprobs(data, micro_batch_size=4), atol=1e-5, rtol=0
    )
    assert "get_logprobs/compute" in timer.get_timing_metrics()
    reference = two_ranks.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert torch.equal(reference, initial)
    odd = two_ranks.train(data, nll_loss, eval_mode=True)
    same = one.train_step(
        data, nll_loss, eval_mode=True, global_batch_size=15, micro_batch_size=15
    )
    torch.testing.assert_close(odd["loss"], same["loss"], atol=1e-5, rtol=0)

    # The state of two ranks resumes bitwise on one; then on two.
    two_ranks.save_checkpoint(tmp_path / "w", tmp_path / "o")
    resumed = _one_rank(tiny_model, optimizer_path=tmp_path / "o")
    for name, parameter in resumed.model.parameters.items():
        assert torch.equal(parameter, weights[name])
    data = make_batch(16, seed=9)
    expected = two_ranks.train(data, nll_loss)
    after = resumed.train_step(
        data, nll_loss, global_batch_size=16, micro_batch_size=16
    )
    torch.testing.assert_close(after["loss"], expected["loss"], atol=1e-5, rtol=0)
    assert after["lr"].item() == expected["lr"].item()
    two_ranks.load_checkpoint(None, tmp_path / "o")
    again = two_ranks.train(data, nll_loss)
    assert torch.equal(again["loss"], expected["loss"])
    assert torch.equal(again["grad_norm"], expected["grad_norm"])


def test_two_ranks_begin_anew_together(two_ranks, tiny_model, make_batch, nll_loss):
    config = PolicyConfig(
        model_name=str(tiny_model), start_deadline_s=60.0, **SETTINGS, seed=1
    )
    one = _one_rank(tiny_model)
    data = make_batch(16)
    expected = one.train_step(data, nll_loss, global_batch_size=16, micro_batch_size=16)
    for _ in range(4):
        two_ranks.reload(config, init_reference_model=True)
        result = two_ranks.train(data, nll_loss)
        torch.testing.assert_close(result["loss"], expected["loss"], atol=1e-5, rtol=0)


def test_a_snapshot_restores_the_training_state(
    two_ranks, tiny_model, make_batch, nll_loss
):
    data = make_batch(8)
    two_ranks.train(data, nll_loss)
    taken = two_ranks.take_snapshot()
    expected = two_ranks.train(data, nll_loss)
    again = two_ranks.train(data, nll_loss)
    assert again["loss"] != expected["loss"]
    # Each rank has written its part.
    assert len([name for name in taken.files if name.startswith("optimizer/")]) > 2
    two_ranks.reload(two_ranks.config, init_reference_model=True, snapshot=taken)
    found = two_ranks.train(data, nll_loss)
    for name in ("loss", "grad_norm", "lr"):
        assert torch.equal(found[name], expected[name]), name


def test_processes_start_within_the_deadline_of_the_configuration(cluster, tiny_model):
    with pytest.raises(WorkerStartError, match=r"start_deadline_s \(0\.01 s\)"):
        HuggingFacePolicy(tiny_model, cluster, start_deadline_s=0.01, **SETTINGS)


def test_bad_rows_are_named_by_the_driver(two_ranks, make_batch, nll_loss):
    with pytest.raises(ContextLengthError, match="max_total_sequence_length = 32"):
        two_ranks.get_logprobs(make_batch(4, width=60))
    data = make_batch(8)
    with pytest.raises(BatchError, match="drop 2 rows or pass global_batch_size=8"):
        two_ranks.train(data, nll_loss, global_batch_size=3)
    with pytest.raises(BatchError, match="use 2"):
        two_ranks.train(data, nll_loss, global_batch_size=1)
    del data["sample_mask"]
    with pytest.raises(BatchError, match="lacks sample_mask"):
        two_ranks.train(data, nll_loss)


def test_impossible_settings_fail_before_a_worker_starts(cluster, tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="got 31 with 2 ranks; use 30 or 32"):
        HuggingFacePolicy(tiny_model, cluster, train_global_batch_size=31)
    with pytest.raises(ModelLoadError, match="does not exist"):
        HuggingFacePolicy(tmp_path / "no", cluster)
    with pytest.raises(ConfigError, match="trian_micro_batch_size"):
        HuggingFacePolicy(tiny_model, cluster, trian_micro_batch_size=2)


def test_preflight_reads_the_context_of_the_folder(tiny_model):
    config = PolicyConfig(model_name=str(tiny_model), max_total_sequence_length=65)
    with pytest.raises(ConfigError, match="use at most 64"):
        check_policy(config, 1)
    config = PolicyConfig(
        model_name=str(tiny_model),
        train_global_batch_size=30,
        max_total_sequence_length=64,
    )
    with pytest.raises(ConfigError, match="got 30 with 4 ranks; use 28 or 32"):
        check_policy(config, 4)


def test_settings_of_the_optimizer_change_on_all_ranks(
    cluster, tiny_model, make_batch, nll_loss
):
    policy = HuggingFacePolicy(tiny_model, cluster, **SETTINGS)
    one = _one_rank(tiny_model)
    try:
        for step in range(4):
            if step == 2:
                policy.change_optimizer(lr=5e-2, weight_decay=0.5)
                one.change_optimizer({"lr": 5e-2, "weight_decay": 0.5})
            data = make_batch(8, seed=step)
            expected = one.train_step(
                data, nll_loss, global_batch_size=8, micro_batch_size=8
            )
            got = policy.train(data, nll_loss)
            torch.testing.assert_close(got["loss"], expected["loss"], atol=1e-5, rtol=0)
            assert got["lr"].item() == ([5e-4, 1e-3] + [5e-2] * 2)[step]
        assert policy.config.optimizer.kwargs["lr"] == 5e-2
        with pytest.raises(ConfigError, match="lr must be a number"):
            policy.change_optimizer(lr=-1.0)
    finally:
        policy.shutdown()
