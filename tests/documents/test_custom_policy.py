"""A policy of two methods, and GRPO on it in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rl_algorithms import GRPOTrainer, TrainResult
from rl_algorithms.errors import LossInputError
from rl_distributed import BatchedDataDict
from rl_distributed.errors import BatchError, ConfigError
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


def code_of_answer(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)))


def fit(
    policy: Any, model: str, folder: Path, resume: bool = False, **settings: Any
) -> TrainResult:
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
    return trainer.fit(ROWS, reward_fn=code_of_answer, progress=False, resume=resume)


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


class WithoutLogprobs(PolicyInterface):
    """Answers with one token, without its probability."""

    losses: list[float]

    def generate(self, batch):  # type: ignore[no-untyped-def,override]
        lengths = batch["input_lengths"]
        ids = torch.nn.functional.pad(batch["input_ids"], (0, 1))
        ids[torch.arange(len(ids)), lengths] = torch.arange(40, 40 + len(ids))
        return BatchedDataDict(
            output_ids=ids,
            generation_lengths=torch.ones_like(lengths),
            unpadded_sequence_lengths=lengths + 1,
            truncated=torch.ones_like(lengths) > 0,
        )

    def train(self, batch, loss_fn):  # type: ignore[no-untyped-def,override]
        mask = batch["token_mask"][:, 1:].float()
        loss, _ = loss_fn(batch, mask.sum(), mask.sum(), next_token_logprobs=-mask)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return {"loss": float(loss)}


def test_log_probs_are_asked_for_only_where_they_count(
    model: str, tmp_path: Path
) -> None:
    policy = WithoutLogprobs()
    fit(policy, model, tmp_path / "1")
    assert len(policy.losses) == 1
    with pytest.raises(
        LossInputError, match=r"importance_.*generate return .*to false"
    ):
        fit(policy, model, tmp_path / "2", use_importance_sampling_correction=True)
    policy.get_logprobs = lambda rows: {"logprobs": -rows["token_mask"]}  # type: ignore
    with pytest.raises(ConfigError, match=r"seq_logprob_error_threshold.* null"):
        fit(policy, model, tmp_path / "3", seq_logprob_error_threshold=2.0)
    # With several steps per batch, the log-probs before the first are compared.
    steps = {"train_global_batch_size": 2}
    del policy.get_logprobs
    with pytest.raises(UnsupportedModelError, match=r"get_logprobs.*take one"):
        fit(policy, model, tmp_path / "4", **steps)


def test_versions_go_on_after_a_resume(model: str, tmp_path: Path) -> None:
    class Kept(WithoutLogprobs):
        def save_checkpoint(self, weights_path, *others, **options):  # type: ignore
            Path(weights_path).mkdir(parents=True)

        def load_checkpoint(self, weights_path, *others):  # type: ignore
            pass

    for num_steps, resume in ((2, False), (4, True)):
        settings = {"max_num_steps": num_steps, "checkpointing": {"save_period": 2}}
        result = fit(Kept(), model, tmp_path, resume, **settings)
    _, versions = result.history.column("train:weight_version_min")
    assert versions == [0, 1, 2, 3]


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
