"""A policy whose workers shard the experts of a mixture, against one rank."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_distributed.transfer import receive_tensors
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.parallelism import ParallelismConfig, check_model_divides
from rl_models.policy.preflight import check_policy
from rl_models.policy.training_policy import TrainingPolicy
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.weight_request import WeightRequest
from rl_models.weights.receiving import MessageReceiver

SETTINGS = {
    "train_micro_batch_size": 3,
    "max_total_sequence_length": 32,
    "optimizer": {"kwargs": {"lr": 1e-3}},
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, tiny_model, tiny_folder):
    folder = tmp_path_factory.mktemp("mixture") / "model"
    config = AutoConfig.from_pretrained(tiny_model)
    shape = {
        "vocab_size": config.vocab_size,
        "hidden_size": 32,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


def _one_rank(mixture, **setup):
    backend = DTensorTrainingBackend()
    config = PolicyConfig(model_name=str(mixture), **SETTINGS)
    backend.setup(config.to_dict(), **setup)
    return backend


def _exported(policy):
    export = policy.start_weight_export(WeightRequest(1, bucket_bytes=8192))
    weights = receive_tensors(MessageReceiver(export.messages)).read()
    export.wait(60.0)
    return weights


def test_states_and_weights_of_shared_experts_are_those_of_one_rank(
    ray_cluster, mixture, make_batch, nll_loss, tmp_path
):
    rows = make_batch(8)
    layouts = ({"expert": 2}, {"tensor": 2, "sequence": True}, {"data": 2})
    state = None
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        policy = None
        one = _one_rank(mixture)
        for number, layout in enumerate(layouts):
            config = PolicyConfig(
                model_name=str(mixture), parallelism=layout, **SETTINGS
            )
            if policy is None:
                policy = TrainingPolicy(cluster, config)
            else:
                policy.reload(config, optimizer_path=state)
            expected = one.train_step(
                rows, nll_loss, global_batch_size=8, micro_batch_size=8
            )
            found = policy.train(rows, nll_loss)
            for key in ("loss", "grad_norm"):
                torch.testing.assert_close(
                    found[key], expected[key], atol=1e-5, rtol=1e-4
                )
            weights = _exported(policy)
            state = tmp_path / f"state{number}"
            policy.save_checkpoint(tmp_path / f"weights{number}", state)
            resumed = _one_rank(mixture, optimizer_path=state)
            assert set(weights) == set(resumed.model.parameters)
            for name, parameter in resumed.model.parameters.items():
                assert torch.equal(parameter, weights[name]), name
            folder = AutoModelForCausalLM.from_pretrained(
                tmp_path / f"weights{number}", dtype=torch.float32
            )
            for name, parameter in folder.named_parameters():
                assert torch.equal(parameter, weights[name]), name
        policy.reload(
            config.replace(parallelism={"expert": 2}, generation={"max_new_tokens": 6}),
            optimizer_path=state,
        )
        _check_samples(policy)
        assert policy.shutdown()


def _check_samples(policy):
    prompts = torch.tensor([[3, 4, 5], [6, 7, 0], [8, 9, 2], [5, 2, 0]])
    data = BatchedDataDict(input_ids=prompts, input_lengths=torch.tensor([3, 2, 3, 2]))
    answers = policy.generate(data)
    lengths = answers["unpadded_sequence_lengths"]
    rows = BatchedDataDict(input_ids=answers["output_ids"], input_lengths=lengths)
    logprobs = policy.get_logprobs(rows)["logprobs"]
    column = torch.arange(logprobs.shape[1])
    sampled = (column >= data["input_lengths"][:, None]) & (column < lengths[:, None])
    torch.testing.assert_close(
        answers["logprobs"][sampled], logprobs[sampled], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(
    ("settings", "num_workers", "message"),
    [
        ({"parallelism": {"expert": 3}}, 3, r"\(4 experts\): got 3; use 2 or 4"),
        ({"parallelism": {"expert": 2}}, 3, r"data x context \(3\): got 2; use 1 or 3"),
        (
            {"parallelism": {"expert": 4, "tensor": 2}},
            8,
            r"\(4 experts\): got 2 x 4; use expert = 1 or 2",
        ),
        (
            {"parallelism": {"expert": 2}, "dtensor": {"data_replicas": 2}},
            2,
            r"data_replicas \(1\): got 2",
        ),
        (
            {"parallelism": {"expert": 2}, "lora": {"r": 2}},
            2,
            "lora must be null with policy.parallelism.expert > 1",
        ),
        (
            {"parallelism": {"context": 2}, "dtensor": {"router_loss_weight": 0.1}},
            2,
            "router_loss_weight must be 0 with policy.parallelism.context > 1",
        ),
    ],
)
def test_experts_that_cannot_be_shared_so(mixture, settings, num_workers, message):
    config = PolicyConfig(
        model_name=str(mixture), max_total_sequence_length=32, **settings
    )
    with pytest.raises(ConfigError, match=message):
        check_policy(config, num_workers)


def test_a_model_without_routers(tiny_model):
    settings = {"dtensor": {"router_loss_weight": 0.1}}
    config = PolicyConfig(model_name=str(tiny_model), **settings)
    with pytest.raises(UnsupportedModelError, match="router_loss_weight must be 0"):
        DTensorTrainingBackend().setup(config.to_dict())


def test_the_load_of_experts_is_told(mixture, make_batch, nll_loss):
    config = PolicyConfig(
        model_name=str(mixture), **SETTINGS, dtensor={"router_loss_weight": 0.1}
    )
    backend = DTensorTrainingBackend()
    backend.setup(config.to_dict())
    rows = make_batch(8)
    told = backend.train_step(rows, nll_loss, global_batch_size=8, micro_batch_size=4)
    # K = 2 where all experts are equally loaded.
    assert sum(told["all_mb_metrics"]["router_loss"]) == pytest.approx(0.2, rel=0.3)
    without = _one_rank(mixture).train_step(
        rows, nll_loss, global_batch_size=8, micro_batch_size=4
    )
    added = sum(told["all_mb_metrics"]["router_loss"])
    torch.testing.assert_close(told["loss"], without["loss"] + added)
    evaluated = backend.train_step(
        rows, nll_loss, eval_mode=True, global_batch_size=8, micro_batch_size=4
    )
    assert "router_loss" not in evaluated["all_mb_metrics"]


def test_a_model_without_experts():
    with pytest.raises(ConfigError, match="expert must be 1 with m, which has no exp"):
        check_model_divides(
            ParallelismConfig(expert=2), {"num_attention_heads": 4}, "m"
        )
