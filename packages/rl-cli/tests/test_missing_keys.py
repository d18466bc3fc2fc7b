from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rl_algorithms import algorithm_names, get_algorithm
from rl_algorithms.presets import find_preset, preset_names
from rl_cli.main import _run
from rl_cli.missing_keys import UNSET, fill_required
from rl_cli.run_config import load_run
from rl_distributed import ConfigError


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert _run(["config", "show", *arguments], False) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [*algorithm_names(), *preset_names()])
def test_everything_can_be_shown_and_then_be_completed(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = shown(capsys, name)
    assert f"  model_name: {UNSET}  # required\n" in text
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"needs policy\.model_name") as caught:
        load_run(name, path, [])
    advice = str(caught.value).partition(": add ")[2].split()
    (stage,) = load_run(name, path, advice).stages
    assert stage.config.policy.model_name == "path/to/model"
    settings = preset.settings if (preset := find_preset(name)) else {}
    for section in set(settings) & {"grpo", "loss_fn"}:
        given = type(getattr(stage.config, section)).from_dict(
            yaml.safe_load(text)[section]
        )
        assert getattr(stage.config, section) == given


def test_a_value_that_is_given_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "dapo", "policy.model_name=m", "--json")
    data = json.loads(text)
    assert data["policy"]["model_name"] == "m"
    assert data["grpo"]["use_dynamic_sampling"] is True
    assert UNSET not in text


def test_every_missing_key_is_named_with_an_example() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run("distillation", None, ["seed=3"])
    assert str(caught.value) == (
        "distillation needs policy.model_name and teacher.model_name: add "
        "policy.model_name=path/to/model teacher.model_name=path/to/model"
    )


def test_what_is_wrong_is_refused_though_keys_are_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = _run(["config", "show", "dapo", "grpo.num_prompts_per_step=0"], False)
    assert code == 2
    assert "grpo.num_prompts_per_step must be greater than 0" in capsys.readouterr().err


def test_sections_that_are_filled_in_are_not_required() -> None:
    schema = get_algorithm("ppo").config_class
    tree, missing = fill_required(schema, {"seed": 1})
    assert missing == ["policy.model_name"]
    assert "critic" not in tree
    given = {"policy": {"model_name": "m"}, "critic": {"model_name": UNSET}}
    assert fill_required(schema, given)[1] == ["critic.model_name"]


def test_keys_without_effect_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1=", "answer": "1"}\n')
    overrides = (
        f"policy.model_name={tmp_path}",
        "loss_fn.reference_policy_kl_penalty=0",
        "loss_fn.use_kl_in_reward=true",
        "env.name=sorting",
        f"data.train={rows}",
        f"data.validation={rows}",
        f"output_dir={tmp_path / 'run'}",
    )
    assert _run(["config", "validate", "grpo", *overrides], False) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"grpo on {tmp_path} is valid",
        "grpo: without effect, because loss_fn.reference_policy_kl_penalty=0: "
        "loss_fn.use_kl_in_reward=true",
    ]
