"""Messages while an engine's environment is built, and where it cannot be."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import rl_cli.engine_environment
from rl_cli.console import Terminal
from rl_cli.engine_environment import prepare_engine
from rl_cli.main import _run
from rl_distributed.actor_environments import BuiltEnvironment
from rl_distributed.errors import ActorEnvironmentError
from rl_models import ModelBuildConfig, build_model

DEADLINE_S = 60.0


class Listening(Terminal):
    """Records messages; the third one sets `heard`."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.heard = threading.Event()

    def note(self, message: str) -> None:
        self.notes.append(message)
        if len(self.notes) == 3:
            self.heard.set()


@dataclass(frozen=True, kw_only=True)
class Slow(BuiltEnvironment):
    """Builds until a message says that it takes time."""

    heard: threading.Event = field(default_factory=threading.Event)

    @property
    def label(self) -> str:
        return "slow[engine]"

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def build(self, folder: Path, deadline_s: float) -> None:
        assert self.heard.wait(DEADLINE_S)
        (folder / "bin").mkdir(parents=True)
        python = folder / "bin" / "python"
        python.write_text("")
        python.chmod(0o755)

    def _check(self, stored: object, recheck: bool) -> float:
        return 0.0


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RL_ENV_ROOT", str(tmp_path / "environments"))
    return tmp_path / "environments"


def test_a_build_is_announced_timed_and_made_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Listening()
    environment = Slow(heard=terminal.heard)
    monkeypatch.setattr(
        rl_cli.engine_environment, "get_environment", lambda name: environment
    )
    prepare_engine("my.engine", terminal, tell_every_s=0.01)
    first, second, *_, last = terminal.notes
    assert first.startswith("slow[engine] has no environment on this machine yet")
    assert str(root) in first
    assert second.startswith("slow[engine]: 0 s so far")
    assert last.startswith("slow[engine] is ready")
    again = Listening()
    prepare_engine("my.engine", again)
    assert again.notes == []


def test_what_cannot_be_built_says_what_to_do(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Slow):
        def build(self, folder: Path, deadline_s: float) -> None:
            raise ActorEnvironmentError("building an environment needs uv")

    monkeypatch.setattr(
        rl_cli.engine_environment, "get_environment", lambda name: Broken()
    )
    with pytest.raises(ActorEnvironmentError) as caught:
        prepare_engine("my.engine", Listening())
    said = str(caught.value)
    assert "building an environment needs uv" in said
    assert 'rl env build "my.engine"' in said
    assert "RL_ENV_CONFIG" in said


def test_rl_serve_says_so_where_there_is_no_room_for_an_engine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM's real environment, requested where nothing can be built."""
    monkeypatch.setattr("rl_distributed.init_ray", lambda count: True)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RL_ENV_ROOT", str(tmp_path / "file" / "environments"))
    model = build_model(
        ModelBuildConfig(hidden_size=16, num_hidden_layers=1), tmp_path / "m"
    )
    code = _run(["serve", str(model), "--port", "0", "--engine", "vllm"], False)
    said = capsys.readouterr()
    assert code != 0
    assert said.out == ""
    assert "has no environment on this machine yet" in said.err
    assert "set RL_ENV_ROOT to a folder" in said.err
    assert 'rl env build "rl_models.generation.vllm"' in said.err
