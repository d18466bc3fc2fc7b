"""The losses of scalar heads against float64 formulas, row by row."""

from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses import MseValueLossFn, PreferenceLossFn
from rl_algorithms.testing import LossBatch, check_loss, token_batch
from rl_distributed.errors import ConfigError


def _value_batch(seed):
    generator = torch.Generator().manual_seed(seed + 1000)
    batch = token_batch(seed)
    mask = batch.data["token_mask"]

    def normal():
        return torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    wanted = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    old = normal()
    values = (old + 0.5 * normal()) * wanted
    return LossBatch(
        {**batch.data, "returns": 2 * normal(), "values": old}, {"values": values}
    )


def _value_reference(scale, cliprange):
    def reference(data, inputs, held):
        total, count = 0.0, 0.0
        rows, width = data["token_mask"].shape
        for b in range(rows):
            for t in range(1, width):
                weight = float(data["token_mask"][b, t] * data["sample_mask"][b])
                if not weight:
                    continue
                value = inputs["values"][b, t - 1]
                error = (value - data["returns"][b, t]) ** 2
                if cliprange is not None:
                    old = data["values"][b, t - 1]
                    near = max(min(value, old + cliprange), old - cliprange)
                    error = max(error, (near - data["returns"][b, t]) ** 2)
                total = total + weight * error
                count += weight
        return scale / 2 * total / max(count, 1.0)

    return reference


@pytest.mark.parametrize(("scale", "cliprange"), [(1.0, None), (0.5, 0.2)])
def test_value_loss(scale, cliprange):
    loss = MseValueLossFn({"scale": scale, "cliprange": cliprange})
    check_loss(loss, _value_batch, _value_reference(scale, cliprange))


def test_value_metrics():
    data = {
        "token_mask": torch.tensor([[0.0, 1.0, 1.0]]),
        "sample_mask": torch.ones(1),
        "returns": torch.tensor([[9.0, 1.0, 3.0]]),
        "values": torch.tensor([[0.0, 2.0, 9.0]]),
    }
    values = torch.tensor([[1.0, 2.0, 9.0]])
    one = torch.ones(())
    loss, metrics = MseValueLossFn({"cliprange": 0.5})(
        data, one, 2 * one, values=values
    )
    assert loss.item() == pytest.approx(0.5 * (0.25 + 1.0) / 2)
    found = {name: float(value) for name, value in metrics.items()}
    assert found == pytest.approx(
        {
            "loss": 0.3125,
            "value_mean": 1.5,
            "return_mean": 2.0,
            "value_error": 0.5,
            "value_clip_fraction": 0.5,
        }
    )


def _pair_batch(seed):
    generator = torch.Generator().manual_seed(seed + 2000)
    batch = token_batch(seed, num_rows=8)
    lengths = batch.data["input_lengths"]
    place = torch.arange(batch.data["token_mask"].shape[1])
    last = (place == lengths[:, None] - 1).double()
    values = 2 * torch.randn(last.shape, generator=generator, dtype=torch.float64)
    columns = {
        name: batch.data[name] for name in ("input_ids", "input_lengths", "token_mask")
    }
    counts = torch.ones(8, dtype=torch.float64)
    pair = int(torch.randint(0, 4, (1,), generator=generator))
    counts[2 * pair : 2 * pair + 2] = 0
    return LossBatch(
        {**columns, "value_mask": last, "sample_mask": counts},
        {"values": values * last},
        rows_per_unit=2,
    )


def _pair_reference(margin, centre):
    def reference(data, inputs, held):
        total, count = 0.0, 0
        for b in range(0, len(data["sample_mask"]), 2):
            if not data["sample_mask"][b]:
                continue
            rewards = []
            for row in (b, b + 1):
                at = int(data["input_lengths"][row]) - 1
                rewards.append(inputs["values"][row, at])
            difference = rewards[0] - rewards[1] - margin
            total = total + math.log1p(math.exp(-difference))
            total = total + centre * (rewards[0] + rewards[1]) ** 2
            count += 1
        return total / max(count, 1)

    return reference


@pytest.mark.parametrize(("margin", "centre"), [(0.0, 0.0), (0.7, 0.01)])
def test_preference_loss(margin, centre):
    loss = PreferenceLossFn({"margin": margin, "center_rewards_coef": centre})
    masks = ("sample_mask",)
    check_loss(loss, _pair_batch, _pair_reference(margin, centre), masks=masks)


def test_a_pair_counts_only_with_both_of_its_rows():
    data = {"value_mask": torch.tensor([[0, 1]] * 4)}
    values = torch.tensor([[0.0, 2.0], [0.0, 1.0], [0.0, 5.0], [0.0, -5.0]])
    two = torch.tensor(2.0)
    for sample_mask in ([1.0, 1, 1, 0], [1.0, 1, 0, 1], [1.0, 1, 0, 0]):
        data["sample_mask"] = torch.tensor(sample_mask)
        loss, metrics = PreferenceLossFn()(data, two, two, values=values)
        assert loss.item() == pytest.approx(math.log1p(math.exp(-1.0)))
        assert float(metrics["num_valid_samples"]) == 1.0


def test_preference_metrics():
    data = {
        "value_mask": torch.tensor([[0, 1], [0, 1], [1, 0], [0, 1]]),
        "sample_mask": torch.ones(4),
    }
    values = torch.tensor([[5.0, 2.0], [5.0, 1.0], [-1.0, 5.0], [0.0, 3.0]])
    four = torch.tensor(4.0)
    loss, metrics = PreferenceLossFn()(data, four, four, values=values)
    found = {name: float(value) for name, value in metrics.items()}
    assert found == pytest.approx(
        {
            "loss": loss.item(),
            "accuracy": 0.5,
            "rewards_chosen_mean": 0.5,
            "rewards_rejected_mean": 2.0,
            "rewards_margin_mean": -1.5,
            "num_valid_samples": 2.0,
        }
    )
    assert loss.item() == pytest.approx(
        (math.log1p(math.exp(-1)) + math.log1p(math.exp(4))) / 2
    )


def test_bad_input():
    one = torch.ones(())
    with pytest.raises(LossInputError, match=r"from values: got next_token_logprobs"):
        MseValueLossFn()({}, one, one, next_token_logprobs=one)
    batch = _value_batch(0)
    data = {name: value for name, value in batch.data.items() if name != "returns"}
    with pytest.raises(LossInputError, match="'returns'"):
        MseValueLossFn()(data, one, one, **batch.inputs)
    with pytest.raises(LossInputError, match="got 3 rows"):
        PreferenceLossFn()({}, one, one, values=torch.zeros(3, 2))
    with pytest.raises(LossInputError, match=r"value_mask.*\[4, 2\]"):
        PreferenceLossFn()(
            {"value_mask": torch.zeros(4, 3), "sample_mask": torch.ones(4)},
            one,
            one,
            values=torch.zeros(4, 2),
        )
    with pytest.raises(ConfigError, match="cliprange"):
        MseValueLossFn({"cliprange": 0.0})
    with pytest.raises(ConfigError, match="margin"):
        PreferenceLossFn({"margin": -1.0})
