"""A GRPO run whose Megatron-core training ranks sample, and its resumption."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import check_kept_logprobs

import rl_algorithms as rl
from rl_models import ModelBuildConfig, build_model

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def even(prompt: str, response: str) -> float:
    """Return the share of even digits."""
    return sum(c in "02468" for c in response) / max(len(response), 1)


@pytest.mark.slow
def test_a_run_samples_with_the_weights_that_it_trains(tmp_path: Path) -> None:
    model = str(build_model(ModelBuildConfig.from_dict(SHAPE), tmp_path / "model"))
    settings = {
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "max_new_tokens": 6,
        "output_dir": str(tmp_path / "run"),
        "progress": False,
        "policy.backend": "megatron",
        "policy.generation.backend": "megatron",
        "policy.parallelism.tensor": 2,
        "cluster.workers_per_node": 2,
        "cluster.use_gpus": False,
        "rollout.max_staleness": 0,
        "grpo.val_period": 2,
    }
    prompts = [{"prompt": f"{n}" * (1 + n % 3)} for n in range(16)]
    rows = {"reward_fn": even, "val_dataset": prompts[:4]}
    first = rl.train(model, prompts, **rows, **settings, max_num_steps=2)
    # Nothing is older than the weights: stale rows would not be trained on.
    assert first.history.column("train:num_valid_tokens")[1][-1] > 0
    # Sampled and computed by the same layers: only the order of sums differs.
    gap = first.history.column("train:token_mult_prob_error")[1]
    assert max(abs(value - 1) for value in gap) < 1e-4
    check_kept_logprobs(first.run_dir, num_answers=2 * 4)
    again = rl.train(model, prompts, **rows, **settings, max_num_steps=3, resume=True)
    assert again.history.column("train:num_valid_tokens")[1][-1] > 0
    assert "val:reward" in first.metrics
    # An evaluation has no trainer: it samples by replicas of another backend.
    scores = rl.evaluate(
        tmp_path / "run", prompts[:4], reward_fn=even, max_new_tokens=6, greedy=True
    )
    assert scores.metrics
