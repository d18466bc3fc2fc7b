from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_cli.eval_config import eval_config
from rl_cli.main import _run
from rl_cli.run_folder import RunFolder
from rl_cli.trained_model import model_of_run, weights_of_run
from rl_distributed import ConfigError
from rl_models import ModelBuildConfig, build_model

TASKS = {
    "world": "sorting",
    "part": "held_out",
    "num_rows": 6,
    "settings": {"num_digits": 3},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = ModelBuildConfig.from_dict(
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "tokenizer": {"characters": "0123456789="},
        }
    )
    return str(build_model(config, tmp_path_factory.mktemp("model") / "m", seed=3))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{a}1=", "answer": "1"} for a in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_json_table_and_file(
    model: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    arguments = ["eval", model, "--data", rows, "--env", "sorting", "-n", "2"]
    arguments += ["--max-new-tokens", "4", "--seed", "7"]
    assert _run([*arguments, "--json", "-o", str(out), "-k", "2"], False) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["datasets"]) == {"sums"}
    metrics = printed["datasets"]["sums"]["metrics"]
    assert {"pass@2", "cons@2", "reward", "reward_low"} <= set(metrics)
    assert "pass@1" not in metrics, "only what was asked for"
    saved = json.loads(out.read_text())
    assert len(saved["samples"]) == 10
    assert saved["datasets"] == printed["datasets"]
    assert _run(arguments, False) == 0
    table = capsys.readouterr().out
    assert "pass@2" in table
    assert f"{metrics['pass@2']:.4g}" in table


def test_a_run_is_worth_its_last_stage(model: str, tmp_path: Path) -> None:
    run: dict[str, Any] = {
        "kind": "recipe",
        "name": "two",
        "config": {
            "title": "two stages",
            "stages": {
                "first": {"algorithm": "sft", "policy": {"model_name": model}},
                "second": {"algorithm": "sft"},
            },
        },
    }
    (tmp_path / "stages").mkdir()
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        model_of_run(str(tmp_path))
    (tmp_path / "stages" / "first.json").write_text('{"checkpoint": "there"}')
    assert model_of_run(str(tmp_path)) == "there"
    (tmp_path / "stages" / "second" / "checkpoints" / "step_3").mkdir(parents=True)
    assert model_of_run(str(tmp_path)) == str(tmp_path / "stages" / "second")
    assert model_of_run(model) == model


def test_a_run_that_was_moved_is_worth_the_checkpoint_in_it(tmp_path: Path) -> None:
    source = {"kind": "algorithm", "name": "sft", "config": {}}
    config = {"policy": {"model_name": "model"}, "sft": {"max_num_steps": 2}}
    (tmp_path / "run.json").write_text(json.dumps({**source, "config": config}))
    left = "/left/run/checkpoints/step_2"
    result = {"metrics": {}, "steps": 2, "run_dir": "/left/run", "stop_reason": ""}
    result |= {"best_checkpoint": left, "checkpoint": f"{left}/policy/weights"}
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert model_of_run(str(tmp_path)) == left
    weights = tmp_path / "checkpoints" / "step_2" / "policy" / "weights"
    weights.mkdir(parents=True)
    assert model_of_run(str(tmp_path)) == str(weights.parent.parent)
    assert weights_of_run(str(tmp_path)) == str(weights)
    # Likewise for a stage, whose model the next one goes on with.
    (tmp_path / "stages" / "one" / "checkpoints" / "step_2").mkdir(parents=True)
    stage = {"checkpoint": left, "model": f"{left}/policy/weights"}
    (tmp_path / "stages" / "one.json").write_text(json.dumps(stage))
    found = RunFolder(tmp_path).stage_result("one")
    kept = tmp_path / "stages" / "one" / "checkpoints" / "step_2"
    assert found == {"checkpoint": str(kept), "model": str(kept / "policy" / "weights")}


def test_the_run_of_a_trainer_is_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"kind": "trainer", "config": {}}))
    assert model_of_run(str(tmp_path)) == str(tmp_path)


def test_arguments_come_before_the_run(model: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_1"
    weights = checkpoint / "policy" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (checkpoint / "config.yaml").write_text(
        json.dumps(
            {
                "data": {
                    "input_key": "q",
                    "train": {"path": "train.jsonl"},
                    "validation": {"tasks": TASKS},
                },
                "env": {"name": "sorting"},
                "policy": {"generation": {"max_new_tokens": 9, "temperature": 0.5}},
            }
        )
    )
    config = eval_config(str(checkpoint), [], None, {}, [])
    assert config.datasets["validation"].tasks is not None
    assert config.data.input_key == "q"
    assert (config.generation.max_new_tokens, config.generation.temperature) == (9, 0.5)
    changed = eval_config(
        str(checkpoint),
        ["a/one.jsonl", "b=two.jsonl"],
        "math",
        {"temperature": 1.0, "num_generations": 4},
        ["data.input_key=prompt", "generation.top_p=0.9"],
    )
    assert {n: d.path for n, d in changed.datasets.items()} == {
        "one": "a/one.jsonl",
        "b": "two.jsonl",
    }
    assert changed.env is not None
    assert changed.env.name == "math"
    assert changed.data.input_key == "prompt"
    assert changed.generation.temperature == 1.0
    assert changed.generation.top_p == 0.9
    assert changed.all_ks() == [1, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such/folder", "--data", "DATA", "--env", "sorting"], "no/such/folder"),
        (["no/such/folder"], "no/such/folder"),
        (["MODEL", "--data", "gone.jsonl", "--env", "sorting"], "gone.jsonl"),
        (["MODEL", "--env", "sorting"], "nothing to ask"),
        (["MODEL", "--data", "DATA"], "rewards answers"),
        (["MODEL", "--data", "DATA", "--env", "sortin"], "sorting"),
        (["MODEL", "--data", "DATA", "--env", "sorting", "-k", "2"], "-k 2 needs"),
        (["MODEL", "--data", "DATA", "--data", "DATA"], "two datasets"),
        (["MODEL", "--data", "=x"], "NAME=PATH"),
        (["MODEL", "--data", "DATA", "batch_sise=3"], "batch_size"),
    ],
)
def test_wrong_input_is_named_with_exit_code_2(
    model: str,
    rows: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    names = {"MODEL": model, "DATA": rows}
    arguments = [names.get(part, part) for part in arguments]
    assert _run(["eval", *arguments], False) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["eval", "--help"], False) == 0
    assert "rl eval runs/quickstart-001" in capsys.readouterr().out
