"""The environment `file`: a class in a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_distributed.errors import ConfigError
from rl_envs import check_environment, create_env
from rl_envs.registry import EnvironmentSpec

TEXT = """
from rl_distributed.actor_environments import OverlayEnvironment
from rl_envs import EnvironmentInterface, EnvironmentReturn

class Environment(EnvironmentInterface):
    actor_environment = OverlayEnvironment(("judge==1",))

    def __init__(self, worth: float = 1.0):
        self.worth = worth

    def step(self, message_log_batch, metadata):
        size = len(metadata)
        return EnvironmentReturn(
            [{"role": "user", "content": "?"}] * size, list(metadata), [None] * size,
            [self.worth] * size, [True] * size, None,
        )

class Unfinished(EnvironmentInterface):
    pass

def reward(response):
    return 1.0
"""
LOG = [{"role": "user", "content": "6 x 7 ="}, {"role": "assistant", "content": "42"}]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_class_of_a_file_scores_with_its_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"file": "mine.py", "settings": {"worth": 0.5}}
    spec = EnvironmentSpec.of("file", settings)
    # The path must be valid in a worker, which may run in another folder.
    monkeypatch.chdir("/")
    environment = spec.make()
    assert type(environment).__name__ == "Environment"
    check_environment(environment, [LOG], [{}])
    assert list(environment.step([LOG], [{}]).rewards) == [0.5]


def test_the_class_declares_the_environment_of_its_workers() -> None:
    declared = EnvironmentSpec.of("file", {"file": "mine.py"}).declares
    assert vars(declared)["actor_environment"].requirements == ("judge==1",)


@pytest.mark.parametrize(
    ("settings", "core"),
    [
        ({"file": "gone.py"}, "must be a Python file: 'gone.py' does not exist"),
        ({"file": "."}, "must be a Python file: '.' is a folder"),
        ({"file": "mine.py", "name": "Enviroment"}, "did you mean 'Environment'?"),
        ({"file": "mine.py", "name": "Enviroment"}, "env.settings.name"),
        ({"file": "mine.py", "name": "reward"}, "must be a subclass of"),
        ({"file": "mine.py", "name": "Unfinished"}, "must define step"),
        ({"file": "mine.py", "settings": {"wroth": 1}}, "it takes worth"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    settings: dict[str, object], core: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        create_env("file", settings)
    assert core in str(caught.value)
