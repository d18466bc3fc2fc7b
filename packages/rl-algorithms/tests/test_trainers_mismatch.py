from __future__ import annotations

import logging
import math

import pytest
import torch

from rl_algorithms.errors import MismatchError
from rl_algorithms.losses import ClippedPGLossFn
from rl_algorithms.losses.mismatch import log_ratios_by_position, position_label
from rl_algorithms.trainers.sampling.mismatch import (
    MismatchMonitor,
    mismatch_metrics,
)
from rl_algorithms.trainers.settings.mismatch_config import MismatchConfig
from rl_algorithms.trainers.steps.training_rows import train_metrics


def batch(width=300, num_rows=4, seed=0):
    """Return a batch whose sampler was slightly off, more so at late positions."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(num_rows, width, generator=generator) * 3
    gap = torch.randn(num_rows, width, generator=generator) * 0.01
    gap[:, 256:] *= 10
    mask = (torch.rand(num_rows, width, generator=generator) < 0.7).float()
    mask[:, 0] = 0
    rows = {
        "advantages": torch.randn(num_rows, generator=generator),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0] * (num_rows - 1) + [0.0]),
        "generation_logprobs": logprobs - gap,
        "prev_logprobs": logprobs,
    }
    counted = (mask * rows["sample_mask"][:, None]) != 0
    return rows, logprobs, gap, counted


def reported(rows, logprobs, parts=1):
    """Return metrics of a step, as the trainer gets them."""
    loss = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0})
    found: dict[str, list] = {}
    num_rows = len(rows["sample_mask"])
    for part in torch.arange(num_rows).chunk(parts):
        own = {name: column[part] for name, column in rows.items()}
        _, metrics = loss(
            own,
            torch.tensor(3.0),
            torch.tensor(100.0),
            next_token_logprobs=logprobs[part][:, 1:],
        )
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return train_metrics({"loss": [0.0], "all_mb_metrics": found})


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("with_prev", [True, False])
def test_quantiles_are_those_of_all_tokens(parts, with_prev):
    rows, logprobs, gap, counted = batch()
    if not with_prev:  # the step's own forward pass is used instead
        del rows["prev_logprobs"]
    found = MismatchMonitor(MismatchConfig()).report(reported(rows, logprobs, parts))
    sizes, ratios = gap[counted].abs(), gap[counted].exp()
    near = {"rel": 0.03, "abs": 1e-6}
    diff = "mismatch/logprob_diff"
    assert found[f"{diff}/mean"] == pytest.approx(sizes.mean().item(), **near)
    assert found[f"{diff}/max"] == pytest.approx(sizes.max().item(), rel=1e-4)
    for percent in (50, 90, 99):
        wanted = sizes.quantile(percent / 100).item()
        assert found[f"{diff}/p{percent}"] == pytest.approx(wanted, rel=0.1)
        ratio = ratios.quantile(percent / 100).item()
        assert found[f"mismatch/ratio/p{percent}"] == pytest.approx(ratio, rel=0.01)
    assert found["mismatch/ratio/mean"] == pytest.approx(ratios.mean().item(), rel=1e-3)
    assert found["mismatch/ratio/max"] == pytest.approx(ratios.max().item(), rel=1e-4)
    assert found["mismatch/ratio/min"] == pytest.approx(ratios.min().item(), rel=1e-4)
    late = gap[:, 256:][counted[:, 256:]].abs()
    assert found[f"{diff}/pos_256_1023/mean"] == pytest.approx(
        late.mean().item(), **near
    )
    assert found[f"{diff}/pos_0_63/mean"] < found[f"{diff}/pos_256_1023/mean"] / 5
    assert not [name for name in found if "log_ratio" in name]
    assert "probs_ratio" in found


@pytest.mark.parametrize(
    ("column", "bucket"), [(1, "pos_0_63"), (63, "pos_0_63"), (64, "pos_64_255")]
)
def test_a_position_is_the_column_of_the_token(column, bucket):
    rows, logprobs, _, _ = batch(width=80)
    rows["token_mask"] = torch.zeros_like(rows["token_mask"])
    rows["token_mask"][1, column] = 1
    found = reported(rows, logprobs)
    names = [name for name in found if name.startswith("mismatch/log_ratio/")]
    assert names == [f"mismatch/log_ratio/{bucket}"]


def test_positions_have_names():
    labels = [position_label(bucket) for bucket in range(5)]
    assert labels[0] == "pos_0_63"
    assert labels[-2:] == ["pos_1024_4095", "pos_4096_up"]
    places = torch.tensor([1, 63, 64, 255, 256, 4095, 4096, 9999])
    found = log_ratios_by_position(torch.zeros(8), places)
    assert [value.count for value in found.values()] == [2, 2, 1, 1, 2]
    assert log_ratios_by_position(torch.zeros(0), places[:0]) == {}


def test_nothing_is_clipped_and_far_ratios_stay_finite():
    found = mismatch_metrics(
        {
            f"mismatch/log_ratio/{label}": value
            for label, value in zip(
                ["a"],
                log_ratios_by_position(
                    torch.tensor([3000.0, -50.0]), torch.tensor([1, 2])
                ).values(),
                strict=True,
            )
        }
    )
    assert found["mismatch/logprob_diff/max"] == 3000.0
    assert found["mismatch/ratio/min"] == pytest.approx(math.exp(-50.0))
    assert math.isfinite(found["mismatch/ratio/max"])


def far(value):
    name = "mismatch/log_ratio/pos_0_63"
    ratios = torch.tensor([0.0, 0.01, value])
    return log_ratios_by_position(ratios, torch.ones(3, dtype=torch.int64)) | {
        "loss": 1.0,
        name: log_ratios_by_position(ratios, torch.ones(3, dtype=torch.int64))[name],
    }


@pytest.mark.parametrize("value", [0.6, -0.6, math.nan, math.inf])
def test_a_limit_stops(value):
    config = MismatchConfig(limit=0.5, statistic="max", action="stop")
    with pytest.raises(MismatchError, match=r"mismatch\.limit is 0\.5|not finite"):
        MismatchMonitor(config).report(far(value))
    assert MismatchMonitor(config).report(far(0.4))["loss"] == 1.0
    # A value equal to the limit is within it.
    largest = mismatch_metrics(far(0.4))["mismatch/logprob_diff/max"]
    exact = MismatchConfig(limit=largest, statistic="max", action="stop")
    assert MismatchMonitor(exact).report(far(0.4))["loss"] == 1.0


def test_a_limit_warns_ever_more_rarely(caplog):
    monitor = MismatchMonitor(MismatchConfig(limit=0.5, statistic="max"))
    with caplog.at_level(logging.WARNING, logger="rl_algorithms"):
        for _ in range(9):
            monitor.report(far(0.7))
    said = [
        r.getMessage()
        for r in caplog.records
        if "trainer and sampler" in r.msg % r.args
    ]
    assert len(said) == 4
    assert "0.7" in said[0]
    assert said[-1].endswith("in 8 steps so far")


def test_no_limit_and_nothing_to_compare():
    monitor = MismatchMonitor(MismatchConfig(limit=None, action="stop"))
    assert monitor.report(far(9.0))["mismatch/logprob_diff/max"] == 9.0
    assert monitor.report({"loss": 2.0}) == {"loss": 2.0}
