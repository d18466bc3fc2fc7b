from __future__ import annotations

import pytest

from rl_algorithms.losses import (
    ClippedPGLossConfig,
    ClippedPGLossFn,
    DistillationLossFn,
    DPOLossFn,
    MseValueLossFn,
    PreferenceLossFn,
)
from rl_distributed.errors import ConfigError

BAD = [
    ({"ratio_clip_mni": 0.1}, "ratio_clip_min"),
    ({"reference_policy_kl_type": "k4"}, "k3"),
    ({"ratio_clip_c": 0.9}, "ratio_clip_c"),
    ({"ratio_clip_min": -0.1}, "ratio_clip_min"),
    ({"ratio_clip_max": -0.1}, "ratio_clip_max"),
    ({"use_cispo": True, "disable_ppo_ratio": True}, "exclude each other"),
    ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c"),
    ({"use_cispo": True, "token_level_loss": False}, "token_level_loss"),
    ({"sequence_level_importance_ratios": True}, "token_level_loss"),
    ({"fixed_length_normalizer": 8}, "token_level_loss"),
    ({"truncated_importance_sampling_ratio": 2.0}, "_type"),
    ({"truncated_importance_sampling_type": "tis"}, "use_importance_sampling"),
    (
        {
            "truncated_importance_sampling_type": "tis",
            "use_importance_sampling_correction": True,
        },
        "for example 2.0",
    ),
    (
        {
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 2.0,
            "use_importance_sampling_correction": True,
        },
        "ratio_min",
    ),
    (
        {
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 2.0,
            "truncated_importance_sampling_ratio_min": 3.0,
            "use_importance_sampling_correction": True,
        },
        "3.0 > 2.0",
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_settings_fail_at_construction(settings, message):
    with pytest.raises(ConfigError, match=message):
        ClippedPGLossConfig.from_dict(settings, source="loss_fn")


def test_what_a_batch_must_have():
    assert ClippedPGLossConfig().needs_reference_logprobs
    plain = ClippedPGLossConfig(reference_policy_kl_penalty=0.0)
    assert not plain.needs_reference_logprobs
    assert plain.names_needing_generation_logprobs == []
    names = ["use_importance_sampling_correction", "use_on_policy_kl_approximation"]
    both = ClippedPGLossConfig.from_dict(dict.fromkeys(names, True))
    assert both.names_needing_generation_logprobs == names


@pytest.mark.parametrize(
    ("loss", "key", "value"),
    [
        (ClippedPGLossFn, "ratio_clip_max", 0.28),
        (DPOLossFn, "label_smoothing", 0.1),
        (PreferenceLossFn, "margin", 0.5),
        (MseValueLossFn, "scale", 0.25),
        (DistillationLossFn, "mixed_kl_weight", 0.25),
    ],
)
def test_options_are_an_object_or_a_mapping_in_every_loss(loss, key, value):
    made = loss({key: value})
    assert getattr(made.config, key) == value
    assert loss(made.config).config is made.config
    assert loss(config=made.config).config is made.config
    with pytest.raises(ConfigError, match=rf"{key}x.*\({loss.__name__}\)"):
        loss({f"{key}x": value})
