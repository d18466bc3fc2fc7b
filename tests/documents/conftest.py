"""Fixtures of the documented programs' tests: Ray, a model, a way to run one."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_distributed.testing import local_ray
from rl_models import ModelBuildConfig, build_model

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def _ray() -> Iterator[None]:
    with local_ray(num_cpus=4):
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with random weights, over printable characters."""
    config = ModelBuildConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    return str(build_model(config, tmp_path_factory.mktemp("documents") / "model"))


@pytest.fixture
def run_program(
    _ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Run `programs/NAME.py` with arguments in this process and an empty folder.

    Return the program's namespace, in which a test looks for its effect.
    """

    def run(name: str, *arguments: str) -> dict[str, Any]:
        path = PROGRAMS / f"{name}.py"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        return runpy.run_path(str(path), run_name="__main__")

    return run
