"""Commands that need no model start without libraries that take seconds to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rl_models import ModelBuildConfig, build_model

HEAVY = ("torch", "ray", "transformers", "vllm", "datasets", "pandas", "matplotlib")
PROGRAM = f"""
import json, sys
from rl_cli.main import main
try:
    main(sys.argv[1:])
finally:
    found = [name for name in {HEAVY!r} if name in sys.modules]
    print(json.dumps(found), file=sys.stderr)
"""


def run(tmp_path, *arguments):
    """Return exit code, output, messages, and the heavy modules that were imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    *messages, heavy = done.stderr.splitlines()
    return done.returncode, done.stdout, "\n".join(messages), json.loads(heavy)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["config", "show", "quickstart"],
        ["config", "show", "dapo", "--json"],
        ["config", "explain", "grpo"],
        ["config", "explain", "policy.optimizer"],
        ["config", "schema", "grpo"],
        ["config", "validate", "quickstart"],
        ["plan", "quickstart"],
        ["plan", "dapo-math-7b"],
        ["recipes"],
        ["dashboard"],
        ["init", "mine", "--yes"],
        ["env", "list"],
        ["envs", "list"],
        ["envs", "check", "countdown", "--tasks", "2"],
        ["envs", "play", "countdown", "--tasks", "2"],
        ["cluster", "slurm", "--help"],
        ["runs", "."],
        ["watch", "--help"],
        ["audit", "verify", "--help"],
        ["ctl", "set", "--help"],
    ],
    ids=" ".join,
)
def test_what_only_tells_imports_nothing_heavy(tmp_path, arguments):
    code, output, messages, heavy = run(tmp_path, *arguments)
    assert code == 0, messages
    assert output
    assert heavy == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", "quickstrat"], "did you mean 'quickstart'"),
        (["train", "quickstart", "seedd=3"], "did you mean 'seed'"),
        (["train", "quickstart", "stages.grpo.grpo.num_prompts=1"], "num_prompts"),
        (["train", "grpo"], "grpo needs policy.model_name"),
        (["train", "grpo", "--config", "none.yaml"], "none.yaml"),
        (["train", "grpo", "policy.model_name=./none"], "'./none' does not exist"),
        (["config", "validate", "quickstart", "sede=3"], "did you mean 'seed'"),
        (["config", "explain", "grppo"], "did you mean 'grpo'"),
        (["generate", "./none", "hello"], "'./none' does not exist"),
        (["generate", "none", "hello"], "'none' is neither a folder here"),
        (["generate", "none", "hello", "--top-p", "3"], "--top-p"),
        (["eval", "./none", "--data", "x.jsonl"], "'./none' does not exist"),
        (["serve", "./none"], "'./none' does not exist"),
        (["envs", "run", "countdown"], "give either --model or --address"),
        (["envs", "run", "countdown", "--model", "./none"], "'./none' does not exist"),
        (["report", "none"], "'none' is not the folder of a run"),
        (["watch", "none"], "'none' is not the folder of a run"),
        (["runs", "none"], "there is no folder 'none'"),
        (["serve", "none", "dtpe=auto"], "did you mean 'dtype'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_without_anything_heavy(tmp_path, arguments, message):
    code, _, messages, heavy = run(tmp_path, *arguments)
    assert code == 2, messages
    assert message in messages
    assert heavy == []


def test_a_model_without_anything_that_scores_is_told_without_anything_heavy(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code, _, messages, heavy = run(tmp_path, "eval", "model", "--data", "x.jsonl")
    assert code == 2, messages
    assert "something that rewards answers" in messages
    assert heavy == []


@pytest.mark.parametrize("command", [["train"], ["config", "validate"]], ids=" ".join)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.name=sorting"], "'x.jsonl' does not exist"),
        (["env.name=sortin"], "did you mean 'sorting'"),
        (["env.name=sorting", "policy.generation.backend=vlm"], "did you mean 'vllm'"),
        (["env.name=sorting", "policy.backend=dtenso"], "did you mean 'dtensor'"),
        (["env.name=sorting", "env.settings.nothing=1"], "nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_that_cannot_start_is_told_without_anything_heavy(
    tmp_path, command, overrides, message
):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    needed = ["policy.model_name=model", "data.train=x.jsonl"]
    code, _, messages, heavy = run(tmp_path, *command, "grpo", *needed, *overrides)
    assert code == 2, messages
    assert message in messages
    assert heavy == []


@pytest.mark.skipif(
    any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "kfd", "dxg")),
    reason="with a GPU the doctor asks torch about it",
)
def test_the_doctor_without_ray_imports_nothing_heavy(tmp_path):
    _, output, _, heavy = run(tmp_path, "doctor", "--no-ray")
    assert "GPUs" in output
    assert heavy == []


def test_answers_are_sampled_without_ray(tmp_path):
    build_model(ModelBuildConfig(hidden_size=16, num_hidden_layers=1), tmp_path / "m")
    code, output, messages, heavy = run(
        tmp_path, "generate", "m", "1+1=", "--max-new-tokens", "2", "--json"
    )
    assert code == 0, messages
    assert json.loads(output)["prompt"] == "1+1="
    assert heavy == ["torch", "transformers"]


def test_the_driver_of_a_run_of_a_ready_model_imports_no_code_of_models():
    program = (
        "import sys, rl_cli.run_stages\n"
        "print('torch' in sys.modules, 'transformers.modeling_utils' in sys.modules, "
        "'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "False"]


def test_a_report_imports_nothing_heavy(tmp_path, make_run):
    folder = make_run()
    code, output, messages, heavy = run(tmp_path, "report", str(folder))
    assert (code, output.strip()) == (0, str(folder / "report.html")), messages
    assert heavy == []
