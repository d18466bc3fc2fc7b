"""The programs promised by the public surface, as a user would write them."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import rl_algorithms as rl
from rl_algorithms import registry as algorithms
from rl_distributed import registry
from rl_distributed.testing import local_ray
from rl_envs import EnvironmentInterface, EnvironmentReturn
from rl_envs.interfaces import last_response
from rl_models import (
    ModelBuildConfig,
    build_model,
    get_generation_backend,
    get_training_backend,
    register_training_backend,
    registry as backends,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = ModelBuildConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    return str(build_model(config, tmp_path_factory.mktemp("api") / "model"))


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    with local_ray(num_cpus=2):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_five_lines(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+"} for n in range(2)]
    datasets.Dataset.from_list(rows).save_to_disk("my-dataset")
    result = rl.train(
        model=model,
        dataset="my-dataset",
        reward_fn=lambda prompt, response: 1.0 if "correct" in response else 0.0,
    )
    assert result.metrics["train:reward"] == 0.0
    assert result.checkpoint_path == tmp_path / "runs/grpo-001/checkpoints/step_1"
    assert list(result.history.to_pandas().index) == [1]


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_own_loop(model: str) -> None:
    program = runpy.run_path(str(ROOT / "examples/own_loop.py"), run_name="own_loop")
    shares = program["main"](model)
    assert len(shares) == 20
    assert shares[-1] > shares[0] + 0.3


class Sevens(EnvironmentInterface[Any]):
    """Rewards sevens; each conversation ends after one answer."""

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        answers = [last_response(log) for log in message_log_batch]
        num_rows = len(answers)
        return EnvironmentReturn(
            observations=[{"role": "user", "content": ""}] * num_rows,
            metadata=list(metadata),
            next_stop_strings=[None] * num_rows,
            rewards=torch.tensor([float("7" in answer) for answer in answers]),
            terminateds=torch.ones(num_rows, dtype=torch.bool),
            answers=list(answers),
        )


class Hooks(rl.Callback):
    """Records every hook call."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.called.append(name)
        return super().__getattribute__(name)


class Rewarded(rl.GRPOTrainer):
    """A custom algorithm, from another package."""

    algorithm = "rewarded"

    def _train_step(self, batch: Any) -> Any:
        return {**super()._train_step(batch), "mine": 1.0}


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_own_environment_algorithm_and_callback(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = rl.algorithm_names()
    monkeypatch.setattr(
        algorithms, "_ALGORITHMS", registry.Registry("rl.algorithms", "x")
    )
    rl.register_algorithm("rewarded")(Rewarded)
    hooks = Hooks()
    result = rl.train(
        model,
        [{"prompt": f"{n}+"} for n in range(8)],
        environment=Sevens(),
        algorithm="rewarded",
        val_dataset=[{"prompt": "1+"}],
        val_at_end=True,
        num_prompts_per_step=4,
        num_generations_per_prompt=4,
        max_total_sequence_length=16,
        output_dir=str(tmp_path / "run"),
        callbacks=[hooks],
    )
    assert {"rewarded", *names} <= set(rl.algorithm_names())
    assert result.steps == 2
    assert result.metrics["train:mine"] == 1.0
    assert 0.0 <= result.metrics["val:reward"] <= 1.0
    assert "val:accuracy" not in result.metrics
    every = {name for name in vars(rl.Callback) if name.startswith("on_")}
    assert set(hooks.called) == every - {"on_exception"}


def test_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests in this process list the names.
    names = dict(backends._TRAINING._registered)
    monkeypatch.setattr(backends._TRAINING, "_registered", names)

    @register_training_backend("custom")
    class CustomTrainingBackend:
        def setup(self, config: Any) -> None: ...
        def train_step(self, batch: Any, loss_fn: Any) -> Any: ...
        def get_logprobs(self, batch: Any) -> Any: ...
        def save_checkpoint(self, path: str) -> None: ...
        def load_checkpoint(self, path: str) -> None: ...
        def shutdown(self) -> None: ...

    assert get_training_backend("custom") is CustomTrainingBackend
    assert get_training_backend("dtensor").__name__.endswith("TrainingBackend")
    assert get_generation_backend("huggingface").__name__.endswith("GenerationBackend")


def test_algorithms_of_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = (ROOT / "examples/focal.py").read_text()
    (tmp_path / "my_focal.py").write_text(
        example.replace('@register_algorithm("focal")\n', "")
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("focal-2", "my_focal:FocalTrainer", "rl.algorithms")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    monkeypatch.setattr(
        algorithms, "_ALGORITHMS", registry.Registry("rl.algorithms", "x")
    )
    assert rl.algorithm_names() == ["focal-2"]
    assert rl.get_algorithm("focal-2").__name__ == "FocalTrainer"
    monkeypatch.delitem(sys.modules, "my_focal")


def test_an_algorithm_takes_less_than_sixty_lines() -> None:
    tree = ast.parse((ROOT / "examples/focal.py").read_text())
    (trainer,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert trainer.end_lineno is not None
    assert trainer.end_lineno - trainer.lineno < 60
