"""The environment `reward`: a function in a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_distributed.errors import ConfigError
from rl_envs import FileReward, check_environment, create_env

LOG = [{"role": "user", "content": "6 x 7 ="}, {"role": "assistant", "content": "42"}]


def written(folder: Path, text: str, name: str = "reward.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_function_of_a_file_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "WORTH = 0.5\n", "worth_of_an_answer.py")
    text = (
        "from worth_of_an_answer import WORTH\n"
        "def reward(prompt: str, response: str, answer: str) -> float:\n"
        "    return WORTH * (response == answer)\n"
    )
    written(tmp_path, text)
    monkeypatch.syspath_prepend(".")
    monkeypatch.chdir(tmp_path)
    environment = create_env("reward", {"file": "reward.py"})
    assert isinstance(environment, FileReward)
    check_environment(environment, [LOG], [{"answer": "42"}])
    scored = environment.step([LOG, LOG], [{"answer": "42"}, {"answer": "7"}])
    assert list(scored.rewards) == [0.5, 0.0]


def test_the_path_holds_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "def score(response: str) -> float:\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    config = FileReward.config_class(file="reward.py", function="score")
    monkeypatch.chdir("/")
    assert list(FileReward(config).step([LOG], [None]).rewards) == [1.0]


@pytest.mark.parametrize(
    ("text", "settings", "core"),
    [
        ("", {"file": "gone.py"}, "must be a Python file: 'gone.py' does not exist"),
        ("", {"file": "."}, "must be a Python file: '.' is a folder"),
        ("", {"file": "notes.txt"}, "its name ends with .py"),
        ("", {}, "file"),
        ("x = 1\n", {"file": "reward.py"}, "has no function 'reward' (it has none)"),
        (
            "def reward(response): return 1\n",
            {"file": "reward.py", "function": "rewrd"},
            "has no function 'rewrd'; did you mean 'reward'?",
        ),
        ("1 / 0\n", {"file": "reward.py"}, "cannot be run: ZeroDivisionError"),
        ("def reward(: pass\n", {"file": "reward.py"}, "cannot be run: SyntaxError"),
        ("def reward(): return 1\n", {"file": "reward.py"}, "reward function 'reward'"),
    ],
)
def test_what_is_wrong_with_the_file_is_said_at_once(
    text: str,
    settings: dict[str, str],
    core: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written(tmp_path, text)
    written(tmp_path, "", "notes.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        create_env("reward", settings)
    assert core in str(caught.value)
