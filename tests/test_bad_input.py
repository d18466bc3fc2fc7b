"""Wrong input: one message that names the thing and the remedy, and exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import recipe, write_recipe

from rl_cli.main import _run
from rl_models import ModelBuildConfig, build_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = ModelBuildConfig.from_dict(recipe()["model"])
    return str(build_model(config, tmp_path_factory.mktemp("m") / "model", seed=0))


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        assert _run(list(arguments), False) == 2
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert "Error: " in err
        return err

    return run


def grpo(model: str, *extra: str) -> list[str]:
    base = [f"policy.model_name={model}", "policy.max_total_sequence_length=12"]
    base += ["policy.generation.max_new_tokens=5", "env.name=sorting"]
    base += ["data.train=rows.jsonl"]
    keys = {text.split("=")[0] for text in extra}
    return ["train", "grpo", *(b for b in base if b.split("=")[0] not in keys), *extra]


CASES = {
    "key": (["grpo.num_promts_per_step=2"], "num_prompts_per_step"),
    "deep key": (["policy.optimizer.kwarg.lr=1"], "kwargs"),
    "type": (["grpo.num_prompts_per_step=lots"], "num_prompts_per_step"),
    "range": (["policy.generation.top_p=2"], "top_p"),
    "batch size": (
        ["policy.train_global_batch_size=30", "cluster.workers_per_node=4"],
        "train_global_batch_size",
    ),
    "model folder": (["policy.model_name=no/such/folder"], "no/such/folder"),
    "data file": (["data.train=gone.jsonl"], "gone.jsonl"),
    "column": (["data.input_key=question"], "question"),
    "backend": (["policy.backend=dtensr"], "dtensor"),
    "generation backend": (["policy.generation.backend=hugingface"], "huggingface"),
    "environment": (["env.name=sortng"], "sorting"),
    "environment setting": (["+env.settings.credits=exact"], "credit"),
    "world": (
        ["data.train={tasks: {world: srting, part: train, num_rows: 64}}"],
        "sorting",
    ),
    "cluster": (["cluster.workers_per_node=64"], "64"),
    "context": (["policy.max_total_sequence_length=4000"], "4000"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_wrong_setting(case: str, model: str, refused: Any, tmp_path: Path) -> None:
    rows = ['{"prompt": "312=", "answer": "123"}'] * 64
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    overrides, said = CASES[case]
    assert said in refused(*grpo(model, *overrides))


DATA = {
    "empty": ("", "empty"),
    "broken": ('{"prompt": "1=",\n', "rows.jsonl"),
    "too long": ('{"prompt": "1234567890=", "answer": "1"}\n' * 64, "prompt"),
}


@pytest.mark.parametrize("case", list(DATA))
def test_wrong_data(case: str, model: str, refused: Any, tmp_path: Path) -> None:
    text, said = DATA[case]
    (tmp_path / "rows.jsonl").write_text(text)
    assert said in refused(*grpo(model))


@pytest.mark.parametrize(
    ("name", "said"),
    [("quikstart", "quickstart"), ("gpro", "grpo"), ("no.yaml", "no.yaml")],
)
def test_unknown_recipe(name: str, said: str, refused: Any) -> None:
    assert said in refused("train", name)


def test_misspelled_key_in_a_recipe_file(refused: Any, tmp_path: Path) -> None:
    data = recipe()
    data["stages"]["grpo"]["grpo"]["val_perod"] = 3
    path = write_recipe(tmp_path, data)
    assert "val_period" in refused("train", path)


def test_resume_without_a_run(refused: Any) -> None:
    assert "no run" in refused("train", "quickstart", "--resume")


def test_resume_with_overrides(refused: Any, tmp_path: Path) -> None:
    assert "--resume" in refused("train", "quickstart", "seed=3", "--resume")


def test_used_output_dir(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoints" / "step_3").mkdir(parents=True)
    path = write_recipe(tmp_path, recipe())
    assert "--resume" in refused("train", path, "output_dir=out")
