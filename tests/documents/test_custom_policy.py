"""A policy of two methods, and GRPO on it in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from rl_algorithms import GRPOTrainer
from rl_distributed import BatchedDataDict
from rl_distributed.errors import BatchError
from rl_models import UnsupportedModelError
from rl_models.interfaces import PolicyInterface

Run = Callable[..., dict[str, Any]]
ROWS = [{"prompt": "1"}] * 4


def num_actors() -> int:
    return len(ray._private.state.actors(actor_state_name="ALIVE"))


def test_grpo_learns_on_a_policy_of_two_methods(run_program: Run, model: str) -> None:
    before = num_actors()
    names = run_program("custom_policy", model)
    trainer, result = names["trainer"], names["result"]
    assert num_actors() == before
    assert trainer.components.generation is trainer.components.policy
    assert trainer.components.policy.policy is names["policy"]
    assert trainer.components.sync is None
    assert trainer.components.cluster is None
    _, rewards = result.history.column("train:reward")
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    _, versions = result.history.column("train:weight_version_min")
    assert versions == list(range(20))


class TwoMethods(PolicyInterface):
    """Returns what it is told to."""

    def __init__(self, sampled: Any = None, trained: Any = None) -> None:
        self.sampled, self.trained = sampled, trained

    def generate(self, batch):  # type: ignore[no-untyped-def,override]
        return self.sampled

    def train(self, batch, loss_fn):  # type: ignore[no-untyped-def,override]
        return self.trained


def fit(policy: Any, model: str, folder: Path, **settings: Any) -> None:
    values = {
        "reference_policy_kl_penalty": 0,
        "checkpointing": {"enabled": False},
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "max_num_steps": 1,
        "output_dir": str(folder / "run"),
        **settings,
    }
    trainer = GRPOTrainer(policy, model_name=model, **values)
    trainer.fit(ROWS, reward_fn=lambda prompt, response: 1.0, progress=False)


def test_what_a_run_asks_for_beyond_two_methods_is_named(
    model: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        fit(
            TwoMethods(),
            model,
            tmp_path,
            reference_policy_kl_penalty=0.1,
            checkpointing={"enabled": True},
        )
    for word in (
        "TwoMethods",
        "get_reference_policy_logprobs",
        "reference_policy_kl_penalty=0",
        "save_checkpoint",
        "checkpointing.enabled=false",
    ):
        assert word in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_what_a_policy_of_two_methods_returns_is_checked(
    model: str, tmp_path: Path
) -> None:
    with pytest.raises(
        BatchError, match=r"TwoMethods.generate must return .*output_ids.*NoneType"
    ):
        fit(TwoMethods(), model, tmp_path / "1")
    short = BatchedDataDict({"output_ids": [[1]], "logprobs": [[0.0]]})
    with pytest.raises(BatchError, match=r"truncated are missing"):
        fit(TwoMethods(short), model, tmp_path / "2")
