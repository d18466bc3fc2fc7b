"""Models with one scalar per token, against plain transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import BatchError, ConfigError
from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError, UnsupportedModelError
from rl_models.ops.scalar_head import load_scalar_model
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.types import LossInputType, LossType
from rl_models.weight_request import WeightRequest

SETTINGS = {
    "head": "value",
    "train_micro_batch_size": 3,
    "max_total_sequence_length": 32,
    "optimizer": {"kwargs": {"lr": 1e-2}},
}


class Square:
    """Mean over trained tokens of (value before the token - 1)^2."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.VALUE

    def __call__(self, data, global_valid_seqs, global_valid_toks, values):
        assert values.shape == data["input_ids"].shape
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = ((values[:, :-1] - 1.0).square() * mask).sum() / global_valid_toks
        return loss, {"loss": loss.detach()}


class Apart:
    """Mean over pairs of minus the difference of their last values."""

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.VALUE
    rows_per_group = 2

    def __call__(self, data, global_valid_seqs, global_valid_toks, values):
        assert values.shape[0] % 2 == 0
        assert torch.equal(data["pair"][0::2], data["pair"][1::2])
        last = (values * data["value_mask"]).sum(1)
        weight = data["sample_mask"][0::2]
        difference = (last[0::2] - last[1::2]) * (1 + data["pair"][0::2])
        return -(weight * difference).sum() / (global_valid_seqs / 2), {}


def _by_value(loss_class):
    """Return the loss by value, for workers that cannot import this file."""
    methods = dict(vars(loss_class))
    methods.pop("__dict__", None)
    methods.pop("__weakref__", None)
    return type(loss_class.__name__, (), {**methods, "__module__": "__main__"})()


def _backend(model, setup=None, **settings):
    config = PolicyConfig(model_name=str(model), **{**SETTINGS, **settings})
    backend = DTensorTrainingBackend()
    backend.setup(config.to_dict(), **(setup or {}))
    return backend


def _gradients(backend, data, loss, micro_batch_size):
    taken = {}

    def keep():
        for name, p in backend.model.parameters.items():
            taken[name] = p.grad.clone()
            p.grad = None
        return 0.0, {}

    backend._update = keep
    result = backend.train_step(
        data, loss, global_batch_size=data.size, micro_batch_size=micro_batch_size
    )
    return result["loss"].item(), taken


def _pairs(make_batch, num_rows=16):
    data = make_batch(num_rows)
    column = torch.arange(data["input_ids"].shape[1])
    data["value_mask"] = (column == data["input_lengths"][:, None] - 1).long()
    data["pair"] = torch.arange(num_rows // 2).repeat_interleave(2)
    return data


@pytest.mark.parametrize("head", ["value", "reward"])
def test_values_agree_with_transformers(tiny_model, make_batch, tmp_path, head):
    data = make_batch()
    backend = _backend(tiny_model, head=head)
    mask, ids = data["token_mask"], data["input_ids"]
    before = backend.get_values(data, micro_batch_size=5)
    del data["token_mask"]
    everywhere = backend.get_values(data, micro_batch_size=12)
    column = torch.arange(ids.shape[1])
    within = column < data["input_lengths"][:, None]
    last = column == data["input_lengths"][:, None] - 1
    backend.save_checkpoint(tmp_path / "w")
    kinds = {
        "value": AutoModelForTokenClassification,
        "reward": AutoModelForSequenceClassification,
    }
    plain = kinds[head].from_pretrained(tmp_path / "w", attn_implementation="eager")
    assert plain.config.num_labels == 1
    hidden = plain.model(ids, attention_mask=within.long()).last_hidden_state
    expected = plain.score(hidden).squeeze(-1).detach()
    torch.testing.assert_close(everywhere[within], expected[within], atol=1e-5, rtol=0)
    assert not everywhere[~within].any()
    # With a token mask: the states in which the masked tokens are chosen.
    wanted = torch.nn.functional.pad(mask[:, 1:], (0, 1)) != 0
    torch.testing.assert_close(before[wanted], everywhere[wanted], atol=1e-5, rtol=0)
    assert not before[~wanted].any()
    data["value_mask"] = last
    only_last = backend.get_values(data, micro_batch_size=7)
    torch.testing.assert_close(only_last[last], expected[last], atol=1e-5, rtol=0)
    assert not only_last[~last].any()
    if head == "reward":  # transformers' own name for the model's output
        row = data["input_ids"][:1, : int(data["input_lengths"][0])]
        answer = plain(row).logits.item()
        assert answer == pytest.approx(expected[last][0].item(), abs=1e-5)


def test_padded_dynamic_and_packed_give_the_same_gradients(tiny_model, make_batch):
    data = _pairs(make_batch)
    columns = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
    budget = {**columns, "max_tokens_per_microbatch": 60}
    dynamic = {**budget, "sequence_length_round": 4}
    packing = {
        **budget,
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
    }
    ways = [
        ({}, 16),
        ({}, 4),
        ({"dynamic_batching_args": dynamic}, 1),
        ({"sequence_packing_args": packing}, 1),
    ]
    backend, rectangle = _backend(tiny_model), _backend(tiny_model)
    rectangle.model.can_pack = False
    assert backend.model.can_pack
    for loss_class in (Square, Apart):
        loss, group = loss_class(), getattr(loss_class, "rows_per_group", 1)
        rows = data if group == 2 else data.select_indices(range(16))
        if group == 1:
            del rows["value_mask"]
        reference = None
        for used, (arguments, micro_batch_size) in [
            *((backend, way) for way in ways),
            (rectangle, ways[1]),
        ]:
            shards = rows.shard_by_batch_size(1, 16, rows_per_group=group, **arguments)
            shard = shards[0][0] if arguments else shards[0]
            value, gradients = _gradients(used, shard, loss, micro_batch_size)
            reference = reference or (value, gradients)
            assert value == pytest.approx(reference[0], abs=1e-6)
            for name, gradient in gradients.items():
                torch.testing.assert_close(
                    gradient, reference[1][name], atol=1e-6, rtol=1e-4
                )


def test_head_is_a_function_of_the_seed_and_kept_when_there(tiny_model, tmp_path):
    first = _backend(tiny_model, seed=1).model.module
    again = _backend(tiny_model, seed=1).model.module
    other = _backend(tiny_model, seed=2).model.module
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert not first.score.bias.any()
    assert first.score.weight.abs().max() < 5 / 33
    reward = _backend(tiny_model, head="reward", seed=3)
    reward.save_checkpoint(tmp_path / "w")
    critic = load_scalar_model(tmp_path / "w", "value", seed=4)
    assert torch.equal(critic.score.weight, reward.model.module.score.weight)
    assert not critic.score.bias.any()


def test_resume_is_bitwise(tiny_model, make_batch, tmp_path):
    first = _backend(tiny_model)
    first.train_step(
        make_batch(seed=1), Square(), global_batch_size=12, micro_batch_size=4
    )
    first.save_checkpoint(tmp_path / "w", tmp_path / "o")
    expected = first.train_step(
        make_batch(seed=2), Square(), global_batch_size=12, micro_batch_size=4
    )
    second = _backend(tiny_model, {"optimizer_path": tmp_path / "o"})
    result = second.train_step(
        make_batch(seed=2), Square(), global_batch_size=12, micro_batch_size=4
    )
    assert torch.equal(result["loss"], expected["loss"])
    for name, parameter in first.model.parameters.items():
        assert torch.equal(parameter, second.model.parameters[name]), name
    second.load_checkpoint(tmp_path / "w")
    values = second.get_values(make_batch(), micro_batch_size=12)
    first.load_checkpoint(None, tmp_path / "o")
    assert torch.equal(values, first.get_values(make_batch(), micro_batch_size=12))


def test_bfloat16_keeps_the_head_exact(tiny_model, make_batch):
    plain = _backend(tiny_model).get_values(make_batch(), micro_batch_size=12)
    low = _backend(tiny_model, precision="bfloat16").get_values(
        make_batch(), micro_batch_size=12
    )
    assert low.dtype is torch.float32
    torch.testing.assert_close(low, plain, atol=0.02, rtol=0.05)


@pytest.mark.usefixtures("ray_cluster")
def test_two_ranks_equal_one(tiny_model, make_batch, tmp_path):
    one = _backend(tiny_model)
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        two = HuggingFacePolicy(tiny_model, cluster, **SETTINGS)
        for step in range(3):
            data = make_batch(15, seed=step)
            expected = one.train_step(
                data, Square(), global_batch_size=15, micro_batch_size=15
            )
            result = two.train(data, _by_value(Square))
            for key in ("loss", "grad_norm"):
                torch.testing.assert_close(
                    result[key], expected[key], atol=1e-5, rtol=1e-5
                )
        pairs = _pairs(make_batch, 14)
        expected = one.train_step(
            pairs, Apart(), global_batch_size=14, micro_batch_size=14
        )
        result = two.train(pairs, _by_value(Apart))
        torch.testing.assert_close(
            result["loss"], expected["loss"], atol=1e-5, rtol=1e-5
        )
        data = make_batch(7)
        torch.testing.assert_close(
            two.get_values(data)["values"],
            one.get_values(data, micro_batch_size=7),
            atol=1e-4,
            rtol=0,
        )
        two.save_checkpoint(tmp_path / "w", tmp_path / "o")
        resumed = _backend(tiny_model, {"optimizer_path": tmp_path / "o"})
        torch.testing.assert_close(
            resumed.get_values(data, micro_batch_size=7), two.get_values(data)["values"]
        )
        with pytest.raises(ConfigError, match=r"get_logprobs.*head lm: got 'value'"):
            two.get_logprobs(data)
        with pytest.raises(ConfigError, match=r"start_weight_export.*head lm"):
            two.start_weight_export(WeightRequest(1))
        with pytest.raises(BatchError, match=r"multiple of 2.*got 7; use 8"):
            two.train(data, _by_value(Apart))
        assert two.shutdown()


def test_bad_input(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="generation must be null"):
        PolicyConfig.from_dict(
            {"model_name": "m", "head": "value", "generation": {"max_new_tokens": 2}}
        )
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_scalar_model(tmp_path / "no", "value")
    classes = AutoModelForSequenceClassification.from_pretrained(
        tiny_model, num_labels=3
    )
    classes.save_pretrained(tmp_path / "three")
    with pytest.raises(ModelLoadError, match="one label"):
        load_scalar_model(tmp_path / "three", "reward")
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "timesformer"}')
    with pytest.raises(UnsupportedModelError, match=r"policy\.head"):
        load_scalar_model(tmp_path / "t5", "value")
