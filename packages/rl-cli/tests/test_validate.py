"""`rl config validate` rejects what `rl train` rejects before starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_cli.main import _run
from rl_models import ModelBuildConfig, build_model

ROW = '{"prompt": "312=", "answer": "123"}\n'
BASE = (
    "policy.model_name=model",
    "policy.max_total_sequence_length=12",
    "data.train=rows.jsonl",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validate")
    config = ModelBuildConfig.from_dict(
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "tokenizer": {"characters": "0123456789="},
        }
    )
    build_model(config, folder / "model", seed=3)
    (folder / "rows.jsonl").write_text(ROW * 8)
    (folder / "broken.jsonl").write_text(ROW * 8 + '{"prompt":\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "texts.jsonl").write_text('{"prompt": "1="}\n')
    return folder


def run_of(algorithm: str, *changes: str) -> list[str]:
    changed = {change.split("=")[0] for change in changes}
    base = [key for key in BASE if key.split("=")[0] not in changed]
    return [algorithm, *base, *(c for c in changes if not c.endswith("=-"))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (run_of("sft", "data.train=-"), "data.train is not set and no dataset was"),
        (run_of("sft", "data.train=gone.jsonl"), "dataset 'gone.jsonl' does not exist"),
        (run_of("sft", "data.train=empty.jsonl"), "dataset 'empty.jsonl' is empty"),
        (run_of("sft", "data.train=broken.jsonl"), "line 9: not valid JSON"),
        (run_of("sft", "data.train=texts.jsonl"), "but no column for the answer"),
        (run_of("sft", "data.input_key=question"), "has no such column"),
        (run_of("sft", "data.validation=texts.jsonl"), "'texts.jsonl' has a prompt"),
        (run_of("dpo"), "has no pairs"),
        (run_of("grpo"), "nothing rewards the answers"),
        (run_of("ppo"), "nothing rewards the answers"),
        (
            run_of("sft", "policy.generation={max_new_tokens: 4}"),
            "nothing scores them",
        ),
        (
            run_of(
                "distillation",
                "teacher=model",
                "distillation.max_rollout_turns=2",
            ),
            "distillation.max_rollout_turns needs an environment",
        ),
        (run_of("sft", "policy.model_name=no/such/model"), "does not exist"),
        (run_of("sft", "policy.model_name=rows.jsonl"), "is a file"),
        (run_of("sft", "policy.max_total_sequence_length=33"), "the context of model"),
        (
            run_of("sft", "policy.train_global_batch_size=30", "cluster.num_nodes=4"),
            "must be a multiple of the number of training workers",
        ),
        (
            run_of("grpo", "env.name=sorting", "policy.train_global_batch_size=30"),
            "must divide the samples of a step",
        ),
        (run_of("sft", "output_dir=rows.jsonl"), "rows.jsonl is a file"),
    ],
)
def test_both_refuse_alike(
    arguments: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert _run(["config", "validate", *arguments], False) == 2
    validated = capsys.readouterr().err
    assert said in validated
    assert _run(["train", *arguments, "--quiet"], False) == 2
    assert capsys.readouterr().err == validated
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (run_of("sft"), "sft on model is valid"),
        (run_of("grpo", "env.name=sorting"), "grpo on model is valid"),
        (run_of("distillation", "teacher=model"), "distillation on model is valid"),
        (["quickstart"], "quickstart (warmup by sft, then grpo) is valid"),
    ],
)
def test_what_can_start_is_valid(
    arguments: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert _run(["config", "validate", *arguments], False) == 0
    assert capsys.readouterr().out.splitlines()[0] == said
