"""Two steps on Ray of each preset that needs its own code in the trainer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matrix_cells import cells

import rl_algorithms as rl
from rl_algorithms.registry import algorithm_settings
from rl_algorithms.testing import check_trainer

ROWS = [{"prompt": f"{a}+{b}="} for a in range(8) for b in range(8)]


def reward(prompt: str, response: str) -> float:
    return len(set(response)) / 4


def rewards(prompt: str, response: str) -> dict[str, float]:
    digits = sum(letter.isdigit() for letter in response)
    return {"varied": len(set(response)) / 4, "digits": float(digits)}


@pytest.mark.parametrize(
    "name",
    cells(
        ["cispo", "dapo", "gdpo", "gspo", "reinforce_plus_plus", "rloo"],
        ["dapo", "reinforce_plus_plus"],
    ),
)
def test_each_preset_trains(name, pool, tiny_model, tmp_path):
    settings = algorithm_settings(
        name,
        {
            "seed": 3,
            "output_dir": str(tmp_path / "run"),
            "policy": {
                "model_name": str(tiny_model),
                "max_total_sequence_length": 16,
                "generation": {"max_new_tokens": 4},
                "train_micro_batch_size": 7,
                "train_global_batch_size": 16,
            },
            "grpo": {"num_prompts_per_step": 8, "max_num_steps": 2},
            "checkpointing": {"enabled": False},
        },
    )
    if settings["grpo"].get("num_generations_per_prompt") == 1:
        settings["grpo"]["num_prompts_per_step"] = 32
    else:
        settings["grpo"]["num_generations_per_prompt"] = 4
    config = rl.GRPOConfig.from_dict(settings, source=name)
    result = rl.GRPOTrainer(config, pool=pool).fit(
        ROWS, reward_fn=rewards if name == "gdpo" else reward
    )
    assert result.steps == 2
    numbers = result.metrics
    assert numbers["train:num_samples"] == 32
    assert math.isfinite(numbers["train:loss"])
    assert 0 < numbers["train:grad_norm"] < math.inf
    assert ("train:kl_penalty" in numbers) == config.loss_fn.needs_reference_logprobs


def test_resume_with_everything_at_once(pool, tiny_model, tmp_path):
    """Batches drawn by dynamic sampling and the reference policy are restored."""

    def make(steps: int, folder: Path) -> rl.GRPOTrainer:
        return rl.GRPOTrainer.from_pretrained(
            tiny_model,
            config=algorithm_settings("dapo"),
            max_num_steps=steps,
            num_prompts_per_step=4,
            num_generations_per_prompt=4,
            max_total_sequence_length=16,
            max_new_tokens=4,
            train_global_batch_size=8,
            reference_policy_kl_penalty=0.1,
            use_kl_in_reward=True,
            entropy_coef=0.01,
            seq_logprob_error_threshold=2.0,
            lr=1e-2,
            save_period=1,
            output_dir=str(folder),
        )

    def fit(trainer, callbacks, resume):
        return trainer.fit(
            ROWS[:10],
            reward_fn=lambda prompt, response: float("1" in response),
            callbacks=callbacks,
            resume=resume,
        )

    check_trainer(make, fit, tmp_path)
