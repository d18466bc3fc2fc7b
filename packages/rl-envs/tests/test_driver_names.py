from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_envs import (
    EnvironmentInterface,
    EnvironmentReturn,
    RemoteEnvironment,
    create_env,
    env_registry,
    register_env,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")

_MODULE = """
from rl_envs import FunctionalRewardWrapper, register_env

@register_env("of-a-folder")
def make(points):
    return FunctionalRewardWrapper(lambda prompt, response: points)
"""
_LOGS = [
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for _ in range(2)
]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_registry, "_registered", dict(env_registry._registered))


def rewards_of(name: str, settings: dict[str, Any]) -> list[float]:
    with RemoteEnvironment(name, settings) as remote:
        found = remote.step(_LOGS, [{}, {}]).rewards
    assert isinstance(found, torch.Tensor)
    return found.tolist()


def test_an_environment_of_the_program_makes_another_by_name() -> None:
    @register_env("inner")
    class Inner(EnvironmentInterface[Any]):
        def __init__(self, points: float) -> None:
            self.points = points

        def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
            count = len(message_log_batch)
            return EnvironmentReturn(
                observations=[{"role": "user", "content": ""}] * count,
                metadata=list(metadata),
                next_stop_strings=[None] * count,
                rewards=torch.full((count,), self.points),
                terminateds=torch.ones(count, dtype=torch.bool),
                answers=None,
            )

    @register_env("outer")
    class Outer(EnvironmentInterface[Any]):
        def __init__(self, points: float) -> None:
            self.inner = create_env("inner", {"points": points})

        def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
            return self.inner.step(message_log_batch, metadata)

    assert rewards_of("outer", {"points": 0.5}) == [0.5, 0.5]


def test_a_module_of_the_drivers_search_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env_of_a_folder.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("env_of_a_folder")
    assert rewards_of("of-a-folder", {"points": 2.0}) == [2.0, 2.0]
    monkeypatch.delitem(sys.modules, "env_of_a_folder")
