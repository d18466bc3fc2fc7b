from __future__ import annotations

import math

import pytest
import torch

from rl_distributed.errors import ConfigError
from rl_models.config import OptimizerConfig, PolicyConfig, SchedulerConfig
from rl_models.training.dtensor.gradients import gradient_norm, local_gradients
from rl_models.training.optimizer import (
    build_optimizer,
    build_scheduler,
    change_settings,
    check_optimizer,
)
from rl_models.training.optimizer_steps import clip_gradients
from rl_models.training.process_group import Ranks

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)


def _parameters():
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(3, 4)) for name in "ab"}


def _rates(config, count):
    optimizer = build_optimizer(OptimizerConfig(kwargs={"lr": 2.0}), _parameters(), CPU)
    scheduler = build_scheduler(config, optimizer)
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


class NeedsGpu(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no kernel for this device")


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("torch.optim.LBFGS", "TypeError: .*closure"),
        ("torch.optim.SparseAdam", "RuntimeError: .*dense"),
    ],
)
def test_an_optimizer_that_needs_more_than_gradients_is_refused(name, cause):
    policy = PolicyConfig(
        model_name="m", optimizer={"name": name, "kwargs": {"lr": 1e-3}}
    )
    with pytest.raises(ConfigError, match=f"name must be .*got {name}, .*{cause}"):
        check_optimizer(policy)


@pytest.mark.parametrize("name", ["torch.optim.Adafactor", f"{__name__}.NeedsGpu"])
def test_other_optimizers_are_taken(name):
    policy = PolicyConfig(
        model_name="m", optimizer={"name": name, "kwargs": {"lr": 1e-3}}
    )
    check_optimizer(policy)


def test_warm_up_starts_above_zero_and_reaches_the_rate():
    rates = _rates(SchedulerConfig(warmup_steps=4), 6)
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_cosine_and_linear_end_at_the_floor():
    kwargs = {"total_steps": 5, "min_lr_ratio": 0.1}
    linear = _rates(SchedulerConfig(name="linear", kwargs=kwargs), 8)
    assert linear[0] == 2.0
    assert linear[5:] == pytest.approx([0.2, 0.2, 0.2])
    cosine = _rates(SchedulerConfig(name="cosine", kwargs={"total_steps": 4}), 3)
    expected = [1 + math.cos(math.pi * i / 4) for i in range(3)]
    assert cosine == pytest.approx(expected)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_steps_of_the_warm_up_are_among_the_total(name):
    kwargs = {"total_steps": 6, "min_lr_ratio": 0.1}
    rates = _rates(SchedulerConfig(name=name, kwargs=kwargs, warmup_steps=2), 8)
    assert rates[:3] == pytest.approx([1.0, 2.0, 2.0])
    # Halfway from the end of the warm-up.
    assert rates[4] == pytest.approx(1.1)
    assert rates[6:] == pytest.approx([0.2, 0.2])


def test_torch_schedules_follow_the_warm_up():
    config = SchedulerConfig(
        name="StepLR", kwargs={"step_size": 2, "gamma": 0.5}, warmup_steps=2
    )
    assert _rates(config, 6) == pytest.approx([1.0, 2.0, 2.0, 2.0, 1.0, 1.0])


@pytest.mark.parametrize("name", ["NoSuchLR", "ReduceLROnPlateau", "Optimizer"])
def test_unknown_schedules_are_config_errors(name):
    with pytest.raises(ConfigError, match=r"policy\.scheduler\.name"):
        _rates(SchedulerConfig(name=name), 1)


def test_unknown_optimizers_and_arguments_are_config_errors():
    with pytest.raises(ConfigError, match="there is no class"):
        build_optimizer(
            OptimizerConfig(name="torch.optim.Adamw", kwargs={"lr": 1.0}),
            _parameters(),
            CPU,
        )
    with pytest.raises(ConfigError, match="wieght_decay"):
        build_optimizer(
            OptimizerConfig(kwargs={"lr": 1.0, "wieght_decay": 0.1}),
            _parameters(),
            CPU,
        )


def test_clipping_scales_to_the_norm():
    parameters = _parameters()
    for parameter in parameters.values():
        parameter.grad = torch.randn(3, 4)
    flat = torch.cat([p.grad.reshape(-1).double() for p in parameters.values()])
    norm = gradient_norm(parameters, ALONE)
    assert norm == pytest.approx(flat.norm().item(), rel=1e-6)
    clip_gradients(local_gradients(parameters), norm, 0.5)
    assert gradient_norm(parameters, ALONE) == pytest.approx(0.5, rel=1e-5)
    before = parameters["a"].grad.clone()
    clip_gradients(local_gradients(parameters), 0.5, None)
    clip_gradients(local_gradients(parameters), 0.5, 0.6)
    assert torch.equal(parameters["a"].grad, before)


def _rates_with_a_change(config, count, at, rate):
    optimizer = build_optimizer(OptimizerConfig(kwargs={"lr": 2.0}), _parameters(), CPU)
    scheduler = build_scheduler(config, optimizer)
    rates = []
    for step in range(count):
        if step == at:
            change_settings(optimizer, scheduler, {"lr": rate})
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates


@pytest.mark.parametrize(
    "config",
    [
        SchedulerConfig(warmup_steps=4),
        SchedulerConfig(name="cosine", kwargs={"total_steps": 8}, warmup_steps=2),
        SchedulerConfig(name="linear", kwargs={"total_steps": 8}),
        SchedulerConfig(name="StepLR", kwargs={"step_size": 2, "gamma": 0.5}),
        SchedulerConfig(
            name="StepLR", kwargs={"step_size": 2, "gamma": 0.5}, warmup_steps=3
        ),
        SchedulerConfig(name="CosineAnnealingLR", kwargs={"T_max": 9}),
    ],
    ids=lambda config: f"{config.name}-{config.warmup_steps}",
)
@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_another_rate_scales_the_schedule_from_its_step_on(config, at):
    before = _rates(config, 8)
    rates = _rates_with_a_change(config, 8, at, 3.0)
    assert rates[:at] == before[:at]
    assert rates[at:] == pytest.approx([1.5 * rate for rate in before[at:]])


def test_another_rate_without_a_schedule():
    assert _rates_with_a_change(None, 4, 2, 0.5) == [2.0, 2.0, 0.5, 0.5]


def test_a_rate_of_zero_can_be_raised_with_our_schedules():
    config = SchedulerConfig(warmup_steps=2)
    optimizer = build_optimizer(OptimizerConfig(kwargs={"lr": 0.0}), _parameters(), CPU)
    scheduler = build_scheduler(config, optimizer)
    change_settings(optimizer, scheduler, {"lr": 1.0})
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_changes_that_cannot_be():
    optimizer = build_optimizer(OptimizerConfig(kwargs={"lr": 0.0}), _parameters(), CPU)
    step_lr = build_scheduler(
        SchedulerConfig(name="StepLR", kwargs={"step_size": 2}), optimizer
    )
    with pytest.raises(ConfigError, match="cannot change from 0 with the schedule"):
        change_settings(optimizer, step_lr, {"lr": 1.0})
    with pytest.raises(ConfigError, match="AdamW has no such setting"):
        change_settings(optimizer, None, {"warmth": 1.0})
    assert optimizer.param_groups[0]["lr"] == 0.0
