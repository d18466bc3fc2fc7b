"""`rl init`: its output is valid and trains, and existing files are kept."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from matrix_cells import cells

from rl_cli.main import _run
from rl_cli.starter_files import OWN_ENVIRONMENTS, TASKS
from rl_distributed.testing import local_ray

Capture = pytest.CaptureFixture[str]
TURNS = "train:avg_turns_per_sample"
ANSWERED = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(40)]
BARE = [{"prompt": f"write of {n}"} for n in range(40)]
PAIRS = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(40)]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, rows in (("answered", ANSWERED), ("bare", BARE), ("pairs", PAIRS)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class _Terminal(io.StringIO):
    """Simulates what a user types."""

    def isatty(self) -> bool:
        return True


def test_commands_quote_the_folder(place: Path, capsys: Capture) -> None:
    assert _run(["init", "my run", "--yes"], False) == 0
    assert "cd 'my run' && rl train run.yaml" in capsys.readouterr().out
    assert _run(["init", "my run", "--yes"], False) == 2
    assert "rl init 'my run-2'" in capsys.readouterr().err


def test_the_defaults_train(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert _run(["init", "mine", "--yes"], False) == 0
    assert "cd mine && rl train run.yaml" in capsys.readouterr().out
    assert sorted(path.name for path in (place / "mine").iterdir()) == [
        "held_out.jsonl",
        "reward.py",
        "rows.jsonl",
        "run.yaml",
        "test_reward.py",
    ]
    monkeypatch.chdir(place / "mine")
    short = ["stages.grpo.grpo.max_num_steps=2", "output_dir=out", "report.plot=false"]
    with local_ray(num_cpus=2):
        assert _run(["train", "run.yaml", *short, "--quiet", "--json"], False) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["steps"] == 2
    assert result["measure"] == "val:accuracy"
    assert (place / "mine/out/result.json").is_file()


def test_no_held_out_row_of_the_example_is_trained_on(place: Path) -> None:
    assert _run(["init", "mine", "--yes"], False) == 0
    train, held_out = (
        {json.loads(line)["prompt"] for line in file.read_text().splitlines()}
        for file in (place / "mine/rows.jsonl", place / "mine/held_out.jsonl")
    )
    assert len(train) + len(held_out) == 1000
    assert not train & held_out


@pytest.mark.parametrize("machine", ["cpu", "1x24GB", "2x8x80GB"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_on_every_machine_is_valid_and_can_be_planned(
    task: str, machine: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--task", task, "--machine", machine, "--budget", "7"]
    assert _run(["init", "mine", *words, "--yes"], False) == 0
    monkeypatch.chdir(place / "mine")
    assert _run(["config", "validate", "run.yaml"], False) == 0
    assert _run(["plan", "run.yaml"], False) == 0
    recipe = yaml.safe_load(Path("run.yaml").read_text())
    (stage,) = recipe["stages"].values()
    assert stage[stage["algorithm"]]["max_num_steps"] == 7
    assert stage["cluster"]["use_gpus"] is (machine != "cpu")
    assert Path("reward.py").exists() == (task == "reward")
    assert Path("test_reward.py").exists() == (task == "reward")
    assert Path("environment.py").exists() == (task in OWN_ENVIRONMENTS)
    assert Path("test_environment.py").exists() == (task in OWN_ENVIRONMENTS)


@pytest.mark.parametrize(
    ("data", "task", "parameter"),
    [
        ("answered.jsonl", "reward", "answer: str"),
        ("bare.jsonl", "reward", "prompt: str"),
        ("gsm8k", "reward", "ground_truth: str"),
        ("tulu3", "imitate", None),
        ("helpsteer3", "prefer", None),
        ("pairs.jsonl", "prefer", None),
        ("answered.jsonl", "imitate", None),
        ("mbpp", "code", None),
        ("someone/questions", "math", None),
    ],
)
def test_data_of_ones_own(
    data: str, task: str, parameter: str | None, place: Path
) -> None:
    words = ["--data", data, "--task", task, "--model", "Qwen/Qwen2.5-0.5B"]
    assert _run(["init", "deep/mine", *words, "--yes"], False) == 0
    folder = place / "deep" / "mine"
    assert not (folder / "rows.jsonl").exists()
    train = yaml.safe_load((folder / "run.yaml").read_text())["stages"].popitem()[1]
    assert train["policy"]["model_name"] == "Qwen/Qwen2.5-0.5B"
    if data.endswith(".jsonl"):
        assert (folder / train["data"]["train"]).resolve() == place / data
    if parameter is not None:
        assert parameter in (folder / "reward.py").read_text()


@pytest.mark.parametrize("data", ["example", "bare.jsonl"])
def test_the_reward_passes_its_tests_and_a_wrong_one_fails(
    data: str, place: Path, capsys: Capture
) -> None:
    assert _run(["init", "mine", "--yes", "--data", data], False) == 0
    folder = place / "mine"
    assert run_tests(folder).returncode == 0, run_tests(folder).stdout
    head = (folder / "run.yaml").read_text().splitlines()
    checks = [line for line in head if "rl envs check" in line]
    assert len(checks) == (data == "example")
    for line in checks:
        words = line.removeprefix("#   rl ").split()
        with contextlib.chdir(folder):
            assert _run(words, False) == 0, capsys.readouterr().out
    if data != "example":
        return
    reward = folder / "reward.py"
    reward.write_text(re.sub(r"return .*", "return 1.0", reward.read_text()))
    failed = run_tests(folder)
    assert failed.returncode == 1
    assert "earn" in failed.stdout


@pytest.mark.parametrize("model", cells(["small", "someone/model"], ["small"]))
@pytest.mark.parametrize("task", sorted(OWN_ENVIRONMENTS))
def test_the_environment_passes_its_tests_and_a_wrong_one_fails(
    task: str, model: str, place: Path
) -> None:
    words = ["--task", task, "--model", model, "--data", "answered.jsonl"]
    assert _run(["init", "mine", *words, "--yes"], False) == 0
    folder = place / "mine"
    passed = run_tests(folder, "test_environment.py")
    assert passed.returncode == 0, passed.stdout
    file = folder / "environment.py"
    # Any answer is correct.
    file.write_text(
        re.sub(r"response.strip\(\) == .*strip\(\)", "True", file.read_text())
    )
    failed = run_tests(folder, "test_environment.py")
    assert failed.returncode == 1, failed.stdout


def test_environments_of_ones_own_train(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    short = ["stages.grpo.grpo.max_num_steps=2", "output_dir=out", "report.plot=false"]
    short += ["stages.grpo.grpo.val_at_start=false", "--quiet", "--json"]
    with local_ray(num_cpus=2):
        for task in sorted(OWN_ENVIRONMENTS):
            monkeypatch.chdir(place)
            assert _run(["init", task, "--task", task, "--yes"], False) == 0
            monkeypatch.chdir(place / task)
            assert _run(["train", "run.yaml", *short], False) == 0
            result = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert result["steps"] == 2
            lines = Path("out/stages/grpo/metrics.jsonl").read_text().splitlines()
            found = [json.loads(line).get("metrics", {}) for line in lines]
            turns = [m[TURNS] for m in found if TURNS in m]
            # Wrong answers and tool calls are followed by others.
            assert len(turns) == 2
            assert max(turns) > 1


def run_tests(
    folder: Path, name: str = "test_reward.py"
) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder as a user would."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*words, name], cwd=folder, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_a_person_is_asked_what_was_not_given(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    typed = _Terminal("\nanswered.jsonl\npraise\nmath\n\n0\n50\n")
    monkeypatch.setattr(sys, "stdin", typed)
    assert _run(["init", "mine"], False) == 0
    said = capsys.readouterr().err
    assert said.count("Which") == 5  # the wrong task is asked for again
    (stage,) = yaml.safe_load((place / "mine/run.yaml").read_text())["stages"].values()
    assert stage["env"] == {"name": "math"}
    assert stage["grpo"]["max_num_steps"] == 50
    assert stage["data"]["train"] == "../answered.jsonl"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no terminal to ask in: add --model, --data"),
        (["--yes", "--data", "gone.jsonl"], "'gone.jsonl' does not exist"),
        (["--yes", "--data", "bare.jsonl", "--task", "math"], "rows with an answer"),
        (["--yes", "--data", "bare.jsonl", "--task", "turns"], "rows with an answer"),
        (["--yes", "--machine", "8x"], "such as 8x80GB"),
        (["--yes", "--budget", "0"], "from 1 to"),
        (["--yes", "--task", "praise"], "praise"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    words: list[str], said: str, place: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert _run(["init", "mine", *words], False) == 2
    assert said in capsys.readouterr().err
    assert not (place / "mine").exists()


def test_nothing_is_overwritten(place: Path, capsys: Capture) -> None:
    (place / "reward.py").write_text("mine\n")
    assert _run(["init", "--yes"], False) == 2
    said = capsys.readouterr().err
    assert "reward.py already exists" in said
    assert "as in rl init my-run," in said
    assert (place / "reward.py").read_text() == "mine\n"
    (place / "sums").mkdir()
    (place / "sums" / "run.yaml").touch()
    assert _run(["init", "sums", "--yes"], False) == 2
    assert "as in rl init sums-2," in capsys.readouterr().err
    assert not (place / "run.yaml").exists()


def test_a_run_that_is_not_valid_says_which_file_to_correct(
    place: Path, capsys: Capture
) -> None:
    words = ["--data", "answered.jsonl", "--task", "prefer"]
    assert _run(["init", "mine", *words, "--yes"], False) == 2
    said = capsys.readouterr().err
    assert "has no pairs" in said
    assert f"correct {Path('mine/run.yaml')}" in said
