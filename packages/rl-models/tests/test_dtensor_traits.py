from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from rl_distributed.errors import ConfigError
from rl_models import PolicyConfig
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.training.dtensor.traits import settings_are_plain

NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-2, 2),
    st.sampled_from([0.0, 0.9, 0.999, 1.0]),
)
VALUES = st.one_of(NUMBERS, st.none(), st.text(max_size=2), st.lists(NUMBERS))


def policy(optimizer=None, scheduler=None):
    sections = {"optimizer": optimizer, "scheduler": scheduler}
    given_sections = {name: value for name, value in sections.items() if value}
    return PolicyConfig.from_dict({"model_name": "model", **given_sections})


def test_defaults_are_plain():
    assert settings_are_plain(policy())


@pytest.mark.parametrize(
    "scheduler",
    [
        {"name": "constant", "warmup_steps": 3},
        {"name": "cosine", "kwargs": {"total_steps": 9, "min_lr_ratio": 0.1}},
    ],
)
def test_our_own_schedules_are_plain(scheduler):
    assert settings_are_plain(policy(scheduler=scheduler))


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        ({"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}, None),
        ({"name": "none.Such", "kwargs": {"lr": 0.1}}, None),
        ({"kwargs": {"lr": 0.1, "lrr": 1}}, None),
        (None, {"name": "StepLR", "kwargs": {"step_size": 2}}),
        (None, {"name": "linear", "kwargs": {"total_steps": 9, "min_lr_ratio": "x"}}),
    ],
)
def test_everything_else_is_left_to_torch(optimizer, scheduler):
    assert not settings_are_plain(policy(optimizer, scheduler))


@settings(deadline=None)
@given(
    st.sampled_from(["torch.optim.Adam", "torch.optim.AdamW"]),
    st.dictionaries(st.sampled_from(["betas", "eps", "weight_decay"]), VALUES),
)
def test_what_is_plain_is_taken_by_torch(name, kwargs):
    try:
        config = policy({"name": name, "kwargs": {"lr": 0.1, **kwargs}})
    except ConfigError:
        return
    if settings_are_plain(config):
        DTensorTrainingBackend.check_config(config)
