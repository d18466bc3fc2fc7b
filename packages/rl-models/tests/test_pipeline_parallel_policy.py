"""A policy whose workers hold some of the layers each, against one local rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import BatchError, ConfigError
from rl_distributed.transfer import receive_tensors
from rl_models.config import PolicyConfig
from rl_models.policy.training_policy import TrainingPolicy
from rl_models.testing import TokenCrossEntropy
from rl_models.training.dtensor import DTensorTrainingBackend, model
from rl_models.types import LossInputType
from rl_models.weight_request import WeightRequest
from rl_models.weights.receiving import MessageReceiver

SETTINGS = {
    "train_micro_batch_size": 3,
    "max_total_sequence_length": 32,
    "optimizer": {"kwargs": {"lr": 1e-3}},
    "scheduler": {"warmup_steps": 2},
}
STAGES = {"pipeline": 2}


@pytest.fixture(scope="module")
def staged(ray_cluster, tiny_model):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        config = PolicyConfig(
            model_name=str(tiny_model),
            parallelism=STAGES,
            generation={"max_new_tokens": 6, "stop_token_ids": [1]},
            **SETTINGS,
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


class _WholeLogits:
    """A loss that requests logits and reads each of them."""

    input_type = LossInputType.LOGIT

    def __call__(self, data, global_valid_seqs, global_valid_toks, logits):
        ids = data["input_ids"]
        logprobs = torch.log_softmax(logits[:, :-1], dim=-1)
        chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        return -(chosen * mask).sum() / global_valid_toks, {}


@pytest.mark.parametrize(
    ("sizes", "has"), [({"pipeline": 3}, "2 layers"), ({"tensor": 8}, "4 .*heads")]
)
def test_ranks_refuse_a_layout_that_the_driver_could_not_check(
    tiny_model, monkeypatch, sizes, has
):
    # As of a model of the hub, whose config the driver cannot read.
    monkeypatch.setattr(model, "read_model_config", lambda name: None)
    config = PolicyConfig(
        model_name=str(tiny_model), parallelism=sizes, max_total_sequence_length=32
    )
    layout = SimpleNamespace(shares_model=True, num_stages=1)
    with pytest.raises(ConfigError, match=rf"must divide what .*{has}"):
        model.load_model(config, layout)


def test_stages_equal_one_rank(staged, tiny_model, make_batch, nll_loss):
    assert (staged.num_ranks, staged.data_parallel_size) == (2, 1)
    one = _one_rank(tiny_model)
    initial = staged.get_logprobs(make_batch(15))["logprobs"]
    for step, loss in enumerate((nll_loss, _WholeLogits(), nll_loss)):
        data = make_batch(15, seed=step)
        expected = one.train_step(data, loss, global_batch_size=15, micro_batch_size=15)
        result = staged.train(data, loss)
        for key in ("loss", "grad_norm", "lr"):
            torch.testing.assert_close(result[key], expected[key], atol=1e-6, rtol=1e-5)
    # Both workers have all rows; metrics are those of the last stage.
    assert sum(result["all_mb_metrics"]["rows"]) == 15
    weights = _exported(staged)
    assert list(weights) == list(one.model.parameters)
    for name, parameter in one.model.parameters.items():
        torch.testing.assert_close(weights[name], parameter, atol=2e-4, rtol=0)
    data = make_batch(15)
    expected = one.train_step(
        data, nll_loss, eval_mode=True, global_batch_size=15, micro_batch_size=15
    )
    result = staged.train(data, nll_loss, eval_mode=True)
    torch.testing.assert_close(result["loss"], expected["loss"], atol=1e-4, rtol=0)
    got = staged.get_logprobs(data)["logprobs"]
    wanted = one.get_logprobs(data, micro_batch_size=4)
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=0)
    reference = staged.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert torch.equal(reference, initial)
    found = staged.get_topk_logits(data, k=3)
    for name, column in one.get_topk_logits(data, k=3, micro_batch_size=4).items():
        torch.testing.assert_close(found[name], column, atol=1e-3, rtol=0)


def test_a_state_of_stages_resumes_in_any_layout(
    staged, tiny_model, make_batch, nll_loss, tmp_path
):
    staged.train(make_batch(15), nll_loss)
    weights = _exported(staged)
    staged.save_checkpoint(tmp_path / "w", tmp_path / "o")
    folder = AutoModelForCausalLM.from_pretrained(tmp_path / "w", dtype=torch.float32)
    saved = dict(folder.named_parameters())
    assert all(torch.equal(saved[name], value) for name, value in weights.items())

    # The optimizer state too: its steps on one rank match those of the stages.
    one = _one_rank(tiny_model, optimizer_path=tmp_path / "o")
    for name, parameter in one.model.parameters.items():
        assert torch.equal(parameter, weights[name])
        assert one._steps.optimizer.state[parameter]["step"] > 0
    data = make_batch(16, seed=9)
    expected = staged.train(data, nll_loss)
    after = one.train_step(data, nll_loss, global_batch_size=16, micro_batch_size=16)
    for key in ("loss", "grad_norm", "lr"):
        torch.testing.assert_close(after[key], expected[key], atol=1e-6, rtol=1e-5)
    staged.load_checkpoint(None, tmp_path / "o")
    again = staged.train(data, nll_loss)
    for key in ("loss", "grad_norm"):
        assert torch.equal(again[key], expected[key])

    one.save_checkpoint(tmp_path / "w1", tmp_path / "o1")
    weights = {n: p.detach().clone() for n, p in one.model.parameters.items()}
    staged.load_checkpoint(None, tmp_path / "o1")
    found = _exported(staged)
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    staged.load_checkpoint(tiny_model)


class _Refuses(TokenCrossEntropy):
    """A loss that raises where it is computed, on the last stage."""

    def __call__(self, *arguments, **inputs):
        raise BatchError("these rows have no reward")


def test_a_loss_that_fails_leaves_no_stage_waiting(staged, make_batch, nll_loss):
    with pytest.raises(BatchError, match="these rows have no reward"):
        staged.train(make_batch(15), _Refuses())
    assert staged.train(make_batch(15), nll_loss)["loss"].isfinite().all()


def test_samples_have_the_trainers_logprobs(staged, tiny_folder):
    before = staged.config
    staged.reload(before.replace(model_name=str(tiny_folder)))
    prompts = torch.tensor([[3, 4, 5], [6, 7, 0], [8, 9, 2]])
    data = BatchedDataDict(input_ids=prompts, input_lengths=torch.tensor([3, 2, 3]))
    answers = staged.generate(data)
    lengths = answers["unpadded_sequence_lengths"]
    rows = BatchedDataDict(input_ids=answers["output_ids"], input_lengths=lengths)
    logprobs = staged.get_logprobs(rows)["logprobs"]
    column = torch.arange(logprobs.shape[1])
    sampled = (column >= data["input_lengths"][:, None]) & (column < lengths[:, None])
    torch.testing.assert_close(
        answers["logprobs"][sampled], logprobs[sampled], atol=1e-5, rtol=0
    )
    staged.reload(before, init_reference_model=True)


def test_values_of_stages(staged, tiny_model, make_batch):
    before = staged.config
    one = _one_rank(tiny_model, {"head": "value"})
    staged.reload(before.replace(head="value", generation=None))
    data = make_batch(7)
    torch.testing.assert_close(
        staged.get_values(data)["values"],
        one.get_values(data, micro_batch_size=4),
        atol=1e-5,
        rtol=0,
    )
    staged.reload(before, init_reference_model=True)
