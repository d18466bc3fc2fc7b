"""The maximum row length if the configuration leaves it to the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError
from rl_models.policy import row_length
from rl_models.policy.row_length import with_row_length
from rl_models.row_length import UNKNOWN_CONTEXT


def model(folder: Path, **config: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def policy(name: str, **settings: object) -> PolicyConfig:
    return PolicyConfig.from_dict({"model_name": name, **settings})


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 256}, 256),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"hidden_size": 8}, UNKNOWN_CONTEXT),
        ({"max_position_embeddings": None}, UNKNOWN_CONTEXT),
    ],
)
def test_null_takes_the_context_of_the_model(
    tmp_path: Path, config: dict[str, object], length: int
) -> None:
    name = model(tmp_path / "model", **config)
    assert policy(name).max_total_sequence_length == length
    assert policy(name, max_total_sequence_length=None).row_limit == length
    assert policy(name, max_total_sequence_length=17).row_limit == 17


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"hf_config_overrides": {"max_position_embeddings": 99}}, 99),
        ({"dynamic_batching": {"train_mb_tokens": 100}}, 100),
        ({"dynamic_batching": {"train_mb_tokens": 999}}, 256),
        (
            {
                "sequence_packing": {
                    "train_mb_tokens": 100,
                    "logprob_mb_tokens": 70,
                    "sequence_length_pad_multiple": 8,
                }
            },
            64,
        ),
        ({"generation": {"max_new_tokens": 4, "max_context_length": 40}}, 40),
    ],
)
def test_it_is_less_where_something_else_holds_less(
    tmp_path: Path, settings: dict[str, object], length: int
) -> None:
    name = model(tmp_path / "model", max_position_embeddings=256)
    config = policy(name, **settings)
    assert config.max_total_sequence_length == length
    assert PolicyConfig.from_dict(config.to_dict()) == config


def test_a_model_that_is_no_folder_yet_is_asked_when_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "later"
    early = policy(str(path), dynamic_batching={"train_mb_tokens": 80})
    assert early.max_total_sequence_length is None
    assert early.row_limit == UNKNOWN_CONTEXT
    with pytest.raises(ModelLoadError, match="does not exist"):
        with_row_length(early)
    model(path, model_type="qwen2", max_position_embeddings=128)
    assert with_row_length(early).max_total_sequence_length == 80
    given = policy("org/model", max_total_sequence_length=5)
    assert with_row_length(given) is given

    asked = []
    monkeypatch.setattr(row_length, "check_hub_name", asked.append)
    monkeypatch.setattr(
        row_length.AutoConfig,
        "from_pretrained",
        lambda name, **overrides: row_length.AutoConfig.for_model(
            "qwen2", max_position_embeddings=1000
        ),
    )
    found = with_row_length(policy("org/model"))
    assert (found.max_total_sequence_length, asked) == (1000, ["org/model"])
