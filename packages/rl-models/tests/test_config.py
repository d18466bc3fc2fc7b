from __future__ import annotations

import pytest

from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig

ROWS = {"max_total_sequence_length": 512}


def _config(**settings):
    return PolicyConfig.from_dict({"model_name": "m", **settings}, source="policy")


def test_round_trip():
    config = _config(sequence_packing={"train_mb_tokens": 600})
    assert PolicyConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": {"kwargs": {}}}, "must give lr"),
        ({"optimizer": {"kwargs": {"lr": -1}}}, "number >= 0"),
        ({"train_mirco_batch_size": 3}, "train_micro_batch_size"),
        ({"precision": "float8"}, "float32"),
        (
            {**ROWS, "sequence_packing": {"train_mb_tokens": 100}},
            "at least one row",
        ),
        (
            {
                **ROWS,
                "dynamic_batching": {"train_mb_tokens": 600, "logprob_mb_tokens": 100},
            },
            "logprob_mb_tokens must hold at least one row",
        ),
        (
            {
                "max_total_sequence_length": 60,
                "sequence_packing": {
                    "train_mb_tokens": 60,
                    "sequence_length_pad_multiple": 8,
                },
            },
            r"\(60\) tokens, rounded up 64 .*: got 60",
        ),
        (
            {
                "sequence_packing": {"train_mb_tokens": 600},
                "dynamic_batching": {"train_mb_tokens": 600},
            },
            "exclude each other",
        ),
        ({"scheduler": {"name": "cosine"}}, "total_steps"),
        ({"scheduler": {"name": "cosine", "kwargs": {"totl": 3}}}, "totl"),
        ({"scheduler": {"kwargs": {"x": 3}}}, "must be empty"),
    ],
)
def test_wrong_settings_are_config_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        _config(**settings)


def test_temperature_comes_from_generation():
    assert _config().logprob_temperature == 1.0
    warm = _config(generation={"max_new_tokens": 3, "temperature": 0.5})
    assert warm.logprob_temperature == 0.5
