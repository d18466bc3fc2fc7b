"""A policy whose workers shard layers or tokens, against one local rank."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_distributed.transfer import receive_tensors
from rl_models.config import PolicyConfig
from rl_models.policy.training_policy import TrainingPolicy
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.types import LossInputType
from rl_models.weight_request import WeightRequest
from rl_models.weights.receiving import MessageReceiver

SETTINGS = {
    "train_micro_batch_size": 3,
    "max_total_sequence_length": 32,
    "optimizer": {"kwargs": {"lr": 1e-3}},
    "scheduler": {"warmup_steps": 2},
}
SAMPLING = {"max_new_tokens": 6, "stop_token_ids": [1]}
CUT = {"tensor": 2, "sequence": True}


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cut(cluster, tiny_model):
    config = PolicyConfig(
        model_name=str(tiny_model), parallelism=CUT, generation=SAMPLING, **SETTINGS
    )
    policy = TrainingPolicy(cluster, config, init_reference_model=True)
    yield policy
    assert policy.shutdown()


def _one_rank(tiny_model, settings=None, **setup):
    backend = DTensorTrainingBackend()
    config = PolicyConfig(model_name=str(tiny_model), **SETTINGS, **(settings or {}))
    backend.setup(config.to_dict(), **setup)
    return backend


def _exported(policy):
    export = policy.start_weight_export(WeightRequest(1, bucket_bytes=8192))
    weights = receive_tensors(MessageReceiver(export.messages)).read()
    export.wait(60.0)
    return weights


def test_workers_that_share_layers_equal_one(
    cut, tiny_model, make_batch, nll_loss, tmp_path
):
    assert (cut.num_ranks, cut.data_parallel_size) == (2, 1)
    one = _one_rank(tiny_model)
    initial = cut.get_logprobs(make_batch(15))["logprobs"]
    for step in range(3):
        data = make_batch(15, seed=step)
        expected = one.train_step(
            data, nll_loss, global_batch_size=15, micro_batch_size=15
        )
        result = cut.train(data, nll_loss)
        for key in ("loss", "grad_norm", "lr"):
            torch.testing.assert_close(result[key], expected[key], atol=1e-6, rtol=1e-5)
        # Both workers have all rows; metrics are those of one.
        assert sum(result["all_mb_metrics"]["rows"]) == 15
    weights = _exported(cut)
    assert set(weights) == set(one.model.parameters)
    for name, parameter in one.model.parameters.items():
        # Adam turns rounding of gradients near 0 into steps; `tests/parity` compares
        # weights after SGD.
        torch.testing.assert_close(weights[name], parameter, atol=2e-4, rtol=0)

    data = make_batch(15)
    got = cut.get_logprobs(data)["logprobs"]
    torch.testing.assert_close(
        got, one.get_logprobs(data, micro_batch_size=4), atol=1e-3, rtol=0
    )
    reference = cut.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert torch.equal(reference, initial)
    found = cut.get_topk_logits(data, k=3)
    wanted = one.get_topk_logits(data, k=3, micro_batch_size=4)
    for name, column in wanted.items():
        torch.testing.assert_close(found[name], column, atol=1e-3, rtol=0)

    # A folder for transformers, and a state that resumes in any layout, bitwise.
    cut.save_checkpoint(tmp_path / "w", tmp_path / "o")
    folder = AutoModelForCausalLM.from_pretrained(tmp_path / "w", dtype=torch.float32)
    saved = dict(folder.named_parameters())
    assert all(torch.equal(saved[name], value) for name, value in weights.items())
    resumed = _one_rank(tiny_model, optimizer_path=tmp_path / "o")
    for name, parameter in resumed.model.parameters.items():
        assert torch.equal(parameter, weights[name])
    data = make_batch(16, seed=9)
    expected = cut.train(data, nll_loss)
    after = resumed.train_step(
        data, nll_loss, global_batch_size=16, micro_batch_size=16
    )
    for key in ("loss", "grad_norm"):
        torch.testing.assert_close(after[key], expected[key], atol=1e-6, rtol=1e-5)
    assert after["lr"].item() == expected["lr"].item()
    cut.load_checkpoint(None, tmp_path / "o")
    again = cut.train(data, nll_loss)
    assert torch.equal(again["loss"], expected["loss"])
    assert torch.equal(again["grad_norm"], expected["grad_norm"])


def test_a_state_goes_from_one_layout_to_the_next(
    cluster, cut, tiny_model, make_batch, nll_loss, tmp_path
):
    cut.save_checkpoint(tmp_path / "w", tmp_path / "cut")
    weights = _exported(cut)
    sharded = cut.config.replace(parallelism={"data": 2})
    cut.reload(sharded, optimizer_path=tmp_path / "cut")
    assert cut.data_parallel_size == 2
    found = _exported(cut)
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    cut.save_checkpoint(tmp_path / "w2", tmp_path / "sharded")
    data = make_batch(16, seed=4)
    expected = cut.train(data, nll_loss)
    cut.reload(
        sharded.replace(parallelism=CUT),
        init_reference_model=True,
        optimizer_path=tmp_path / "sharded",
    )
    assert cut.data_parallel_size == 1
    result = cut.train(data, nll_loss)
    torch.testing.assert_close(result["loss"], expected["loss"], atol=1e-5, rtol=0)


def test_samples_of_shared_layers_have_the_trainers_logprobs(cut, tiny_folder):
    before = cut.config
    cut.reload(before.replace(model_name=str(tiny_folder)))
    prompts = torch.tensor([[3, 4, 5], [6, 7, 0], [8, 9, 2]])
    data = BatchedDataDict(input_ids=prompts, input_lengths=torch.tensor([3, 2, 3]))
    answers = cut.generate(data)
    lengths = answers["unpadded_sequence_lengths"]
    rows = BatchedDataDict(input_ids=answers["output_ids"], input_lengths=lengths)
    logprobs = cut.get_logprobs(rows)["logprobs"]
    column = torch.arange(logprobs.shape[1])
    sampled = (column >= data["input_lengths"][:, None]) & (column < lengths[:, None])
    torch.testing.assert_close(
        answers["logprobs"][sampled], logprobs[sampled], atol=1e-5, rtol=0
    )
    cut.reload(before, init_reference_model=True)


def test_values_of_shared_layers(cut, tiny_model, make_batch):
    before = cut.config
    one = _one_rank(tiny_model, {"head": "value"})
    cut.reload(before.replace(head="value", generation=None))
    data = make_batch(7)
    torch.testing.assert_close(
        cut.get_values(data)["values"],
        one.get_values(data, micro_batch_size=4),
        atol=1e-5,
        rtol=0,
    )
    cut.reload(before, init_reference_model=True)


class _WholeLogits:
    """A loss that requests logits and reads each of them."""

    input_type = LossInputType.LOGIT

    def __call__(self, data, global_valid_seqs, global_valid_toks, logits):
        ids = data["input_ids"]
        logprobs = torch.log_softmax(logits[:, :-1], dim=-1)
        chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        return -(chosen * mask).sum() / global_valid_toks, {}


def test_workers_that_share_tokens_equal_one(
    cut, tiny_model, make_batch, nll_loss, tmp_path
):
    before = cut.config
    shared = before.replace(parallelism={"context": 2})
    cut.reload(shared, init_reference_model=True)
    assert cut.data_parallel_size == 1
    one = _one_rank(tiny_model)
    for loss in (nll_loss, _WholeLogits()):
        data = make_batch(15, seed=3)
        expected = one.train_step(data, loss, global_batch_size=15, micro_batch_size=15)
        result = cut.train(data, loss)
        for key in ("loss", "grad_norm", "lr"):
            torch.testing.assert_close(result[key], expected[key], atol=1e-6, rtol=1e-5)
    assert sum(cut.train(data, nll_loss)["all_mb_metrics"]["rows"]) == 15
    one.train_step(data, nll_loss, global_batch_size=15, micro_batch_size=15)
    got = cut.get_logprobs(data)["logprobs"]
    torch.testing.assert_close(
        got, one.get_logprobs(data, micro_batch_size=4), atol=1e-3, rtol=0
    )
    found = cut.get_topk_logits(data, k=3)
    for name, column in one.get_topk_logits(data, k=3, micro_batch_size=4).items():
        torch.testing.assert_close(found[name], column, atol=1e-3, rtol=0)
    cut.save_checkpoint(tmp_path / "w", tmp_path / "o")
    weights = _exported(cut)
    resumed = _one_rank(tiny_model, optimizer_path=tmp_path / "o")
    for name, parameter in resumed.model.parameters.items():
        assert torch.equal(parameter, weights[name])
    expected = cut.train(data, nll_loss)
    after = resumed.train_step(
        data, nll_loss, global_batch_size=15, micro_batch_size=15
    )
    torch.testing.assert_close(after["loss"], expected["loss"], atol=1e-6, rtol=1e-5)
    one = _one_rank(tiny_model, {"head": "value"})
    cut.reload(shared.replace(head="value", generation=None))
    data = make_batch(7)
    torch.testing.assert_close(
        cut.get_values(data)["values"],
        one.get_values(data, micro_batch_size=4),
        atol=1e-5,
        rtol=0,
    )
    cut.reload(before, init_reference_model=True)


def test_a_layout_that_does_not_fit_starts_no_worker(cluster, tiny_model):
    config = PolicyConfig(
        model_name=str(tiny_model), parallelism={"tensor": 4}, **SETTINGS
    )
    with pytest.raises(ConfigError, match="needs a multiple of 4 workers: got 2"):
        TrainingPolicy(cluster, config)
