from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.dpo import DPOLossFn
from rl_algorithms.losses.dpo_config import DPOLossConfig
from rl_algorithms.testing import LossBatch, check_loss, token_batch
from rl_distributed.errors import ConfigError

FORMS = {
    "sigmoid": {"reference_policy_kl_penalty": 0.3},
    "smoothed": {"reference_policy_kl_penalty": 0.7, "label_smoothing": 0.1},
    "averaged": {
        "reference_policy_kl_penalty": 2.0,
        "preference_average_log_probs": True,
    },
    "ipo": {"reference_policy_kl_penalty": 0.2, "preference_loss": "ipo"},
    "ipo_averaged": {
        "reference_policy_kl_penalty": 0.5,
        "preference_loss": "ipo",
        "preference_average_log_probs": True,
    },
    "with_sft": {"sft_loss_weight": 0.5, "preference_loss_weight": 2.0},
    "with_averaged_sft": {"sft_loss_weight": 0.5, "sft_average_log_probs": True},
}


def pairs(seed):
    """Return pairs, one of which is masked out."""
    batch = token_batch(seed, num_rows=8)
    sample_mask = torch.ones(8, dtype=torch.float64)
    sample_mask[2 * (seed % 4) : 2 * (seed % 4) + 2] = 0
    replaced = batch.replaced(sample_mask=sample_mask)
    return LossBatch(replaced.data, batch.inputs, rows_per_unit=2)


def reference(form):
    """Compute the papers' formulas pair by pair."""
    config = DPOLossConfig(**form)
    beta = config.reference_policy_kl_penalty

    def loss(data, inputs, held):
        total, num_pairs = 0.0, 0
        logprobs = inputs["next_token_logprobs"]
        for pair in range(len(logprobs) // 2):
            if data["sample_mask"][2 * pair] == 0:
                continue
            num_pairs += 1
            ratio, nll = [], []
            for row in (2 * pair, 2 * pair + 1):
                learned = [
                    t
                    for t in range(1, data["token_mask"].shape[1])
                    if data["token_mask"][row, t] == 1
                ]
                pi = sum(float(logprobs[row, t - 1]) for t in learned)
                ref = sum(
                    float(data["reference_policy_logprobs"][row, t]) for t in learned
                )
                count = max(len(learned), 1)
                average = config.preference_average_log_probs
                ratio.append((pi - ref) / (count if average else 1))
                nll.append(-pi / (count if config.sft_average_log_probs else 1))
            h = ratio[0] - ratio[1]
            if config.preference_loss == "ipo":
                value = (h - 1 / (2 * beta)) ** 2
            else:
                good = math.log(1 / (1 + math.exp(-beta * h)))
                bad = math.log(1 / (1 + math.exp(beta * h)))
                eps = config.label_smoothing
                value = -(1 - eps) * good - eps * bad
            total += (
                config.preference_loss_weight * value + config.sft_loss_weight * nll[0]
            )
        return total / max(num_pairs, 1)

    return loss


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_is_the_formula_of_its_paper_and_depends_on_nothing_else(form):
    check_loss(
        DPOLossFn(form),
        pairs,
        reference(form),
        masks=("sample_mask",),
        num_examples=8,
    )


def run(batch, form=None, **columns):
    data = {**batch.data, **columns}
    return DPOLossFn(form)(data, *batch.counts(), **batch.inputs)


def test_sums_of_the_reference_serve_as_well_as_its_tokens():
    batch = pairs(3)
    tokens = batch.data["reference_policy_logprobs"] * batch.data["token_mask"]
    sums = tokens[:, 1:].sum(1)
    whole, metrics = run(batch)
    summed, same = run(batch, reference_policy_logprobs=sums)
    assert torch.allclose(whole, summed, rtol=1e-12)
    assert float(metrics["accuracy"]) == float(same["accuracy"])


def test_a_policy_that_is_the_reference_has_log_two_and_no_reward():
    batch = pairs(1)
    ours = torch.nn.functional.pad(batch.inputs["next_token_logprobs"], (1, 0))
    loss, metrics = run(batch, reference_policy_logprobs=ours)
    assert float(loss) == pytest.approx(math.log(2))
    assert float(metrics["rewards_chosen_mean"]) == 0
    assert float(metrics["accuracy"]) == 0, "a tie is not right"
    assert float(metrics["num_valid_samples"]) == 3


def test_swapping_the_answers_mirrors_the_metrics():
    batch = pairs(2)
    swapped = batch.rows(torch.arange(8).view(4, 2).flip(1).flatten())
    _, one = run(batch)
    _, other = run(swapped)
    assert float(one["rewards_margin_mean"]) == -float(other["rewards_margin_mean"])
    assert float(one["accuracy"]) == pytest.approx(1 - float(other["accuracy"]))
    assert float(one["policy_accuracy"]) == pytest.approx(
        1 - float(other["policy_accuracy"])
    )
    assert float(one["rewards_chosen_mean"]) == float(other["rewards_rejected_mean"])


def test_long_answers_lose_no_digits():
    """Float32 log-probs that sum to about -3000 keep their per-token differences."""
    mask = torch.ones(2, 1001)
    ours = torch.full((2, 1000), -3.0)
    reference = torch.full((2, 1001), -3.0)
    reference[0] -= 1e-5
    data = {
        "token_mask": mask,
        "sample_mask": torch.ones(2),
        "reference_policy_logprobs": reference,
    }
    _, metrics = DPOLossFn({"reference_policy_kl_penalty": 1.0})(
        data, torch.tensor(2.0), torch.tensor(1.0), next_token_logprobs=ours
    )
    expected = 1000 * float(ours[0, 0].double() - reference[0, 0].double())
    assert float(metrics["rewards_margin_mean"]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference_policy_kl_penalty": 0}, "greater than 0"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"preference_loss": "ipo", "label_smoothing": 0.1}, "sigmoid only"),
        ({"preference_loss_weight": 0}, "nothing would be learned"),
        ({"preference_loss": "hinge"}, "ipo"),
        ({"sft_weight": 1}, "sft_"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        DPOLossFn(settings)


def test_wrong_batches_are_named():
    batch = token_batch(0, num_rows=3)
    with pytest.raises(LossInputError, match=r"in pairs.*3 rows"):
        run(batch)
    batch = pairs(0)
    missing = {k: v for k, v in batch.data.items() if "reference" not in k}
    with pytest.raises(LossInputError, match="'reference_policy_logprobs'"):
        DPOLossFn()(missing, *batch.counts(), **batch.inputs)


def test_a_pair_counts_only_with_both_of_its_rows():
    batch = token_batch(0, num_rows=6)
    half = batch.data | {"sample_mask": torch.tensor([1.0, 1, 1, 0, 0, 1])}
    whole = batch.data | {"sample_mask": torch.tensor([1.0, 1, 0, 0, 0, 0])}
    form = {**FORMS["with_sft"], "reference_policy_kl_penalty": 0.3}
    (found, metrics), (wanted, _) = (
        DPOLossFn(form)(data, torch.tensor(2.0), torch.tensor(9.0), **batch.inputs)
        for data in (half, whole)
    )
    assert found.item() == pytest.approx(wanted.item())
    assert float(metrics["num_valid_samples"]) == 1.0
