from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rl_cli.main import _run
from rl_cli.run_config import load_run
from rl_cli.run_folder import RunFolder
from rl_cli.sampling import sample
from rl_models import GenerationConfig, ModelBuildConfig, build_model, registry


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


def test_one_prompt_prints_its_answer(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["generate", model, "12=", "--max-new-tokens", "5"], False) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert set(line) <= set("0123456789=")


def test_answers_fill_the_context_that_is_left_unless_a_length_is_given(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["generate", model, "12=", "--json", "-n", "8"], False) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["num_tokens"] <= 32 - 3 for row in rows)
    assert _run(["generate", model, "12=", "--max-new-tokens", "128"], False) == 2
    assert "leaves room for 0 beside max_new_tokens=128" in capsys.readouterr().err


def test_answers_of_a_run_are_as_long_as_in_training(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "step_3"
    shutil.copytree(model, step / "policy" / "weights")
    tokens = {}
    # A section that is null is the same as in a run without sampling.
    for name, generation in (("short", {"max_new_tokens": 2}), ("none", None)):
        (step / "config.yaml").write_text(
            json.dumps({"policy": {"generation": generation}})
        )
        assert _run(["generate", str(step), "12=", "--json", "-n", "8"], False) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        tokens[name] = max(row["num_tokens"] for row in rows)
    assert tokens["short"] == 2 < tokens["none"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-new-tokens", "9" * 20], "'--max-new-tokens': must be an integer from"),
        (["-n", "9" * 20], "'--num-samples': must be an integer from 1 to 1,000,000"),
        (["--seed", "-1"], "'--seed': must be an integer from 0"),
        (["--top-k", "0"], "'--top-k': must be an integer from 1"),
        (["--top-p", "2"], "'--top-p': must be a number greater than 0 and at most 1"),
        (["--temperature", "0"], "'--temperature': must be a number greater than 0"),
    ],
)
def test_numbers_that_cannot_be_are_usage_errors(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["generate", "model", "12=", *arguments], False) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone/of/here", "the model folder 'gone/of/here' does not exist"),
        ("notes.txt", "the model 'notes.txt' is a file"),
        (".", "the model folder . has no config.json"),
    ],
)
def test_what_is_no_model_folder_is_called_one(
    name: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a")
    assert _run(["generate", name, "12="], False) == 2
    assert said in capsys.readouterr().err


def test_an_interrupted_run_answers_from_its_newest_checkpoint(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run("quickstart", None, [f"output_dir={tmp_path / 'run'}"])
    folder = RunFolder.create(run.name, run.output_dir, run.source)
    assert _run(["generate", str(folder.path), "12="], False) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
    for step in ("step_9", "step_10"):
        weights = folder.stage("warmup") / "checkpoints" / step / "policy" / "weights"
        weights.mkdir(parents=True)
    shutil.copytree(model, weights, dirs_exist_ok=True)
    assert _run(["generate", str(folder.path), "12=", "--greedy"], False) == 0
    from_run = capsys.readouterr().out
    assert _run(["generate", model, "12=", "--greedy"], False) == 0
    assert capsys.readouterr().out == from_run


def test_json_samples_are_reproducible_and_counted(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", model, "12=", "345=", "-n", "3", "--json", "--seed", "5"]
    outputs = []
    for _ in range(2):
        assert _run([*arguments, "--max-new-tokens", "6"], False) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    rows = [json.loads(line) for line in outputs[0].splitlines()]
    assert [row["prompt"] for row in rows] == ["12="] * 3 + ["345="] * 3
    assert all(1 <= row["num_tokens"] <= 6 and row["logprob"] < 0 for row in rows)
    assert len({row["response"] for row in rows}) > 1


class _Mute:
    """A generation backend of four methods without log-probs."""

    def setup(self, config: Any) -> None:
        self.model = config["model_name"]

    def generate(self, prompts: list[str], sampling_params: Any) -> list[str]:
        return [prompt[::-1] for prompt in prompts]

    def update_weights(self, state_dict: Any) -> None: ...

    def shutdown(self) -> None: ...


def test_a_backend_without_log_probs_answers_without_them(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry._GENERATION, "_registered", {"mute": _Mute})
    config = GenerationConfig(backend="mute", max_new_tokens=4)
    answers = sample(model, ["12", "345"], config)
    assert [(s.response, s.num_tokens, s.logprob) for s in answers] == [
        ("21", 3, None),
        ("543", 4, None),
    ]


def test_prompts_from_a_file_and_from_standard_input(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("1=\n\n22=\n")
    base = ["generate", model, "--greedy", "--max-new-tokens", "3"]
    assert _run([*base, "--file", str(path)], False) == 0
    from_file = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("1=\n22=\n"))
    assert _run(base, False) == 0
    assert capsys.readouterr().out == from_file
    assert [line.split("\t")[0] for line in from_file.splitlines()] == ["1=", "22="]


def test_a_file_of_prompts_that_is_no_text_is_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("1=\ncaf\u00e9\n".encode("latin-1"))
    assert _run(["generate", model, "--file", str(path)], False) == 2
    assert "prompts.txt is not text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such/folder", "1="], "no/such/folder"),
        (["MODEL", "1=", "--top-p", "1.5"], "--top-p"),
        (["MODEL", "1=", "--temperature", "0"], "temperature"),
        (["MODEL", "1=", "--chat"], "chat template"),
        (["MODEL", "123456789=" * 4], "context"),
        (["MODEL", "1=", "--file", "gone.txt"], "gone.txt"),
    ],
)
def test_wrong_input_is_named_with_exit_code_2(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    arguments = [model if part == "MODEL" else part for part in arguments]
    assert _run(["generate", *arguments], False) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_characters_that_the_model_does_not_see_are_named(
    model: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["generate", "--max-new-tokens", "2", "--greedy"]
    assert _run([*arguments, model, "x9 y2z1="], False) == 0
    assert "has no token for 'x', 'y', 'z' in the prompts; they are left out" in (
        caplog.text
    )
    caplog.clear()
    assert _run([*arguments, model, "12="], False) == 0
    assert "no token for" not in caplog.text
