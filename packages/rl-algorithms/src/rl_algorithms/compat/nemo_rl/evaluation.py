"""Evaluation estimators with the signatures of NeMo RL, as sums over the prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_algorithms.compat.nemo_rl.differences import warn_difference
from rl_algorithms.evaluation.estimators import cons_at_k, pass_at_k

__all__ = ["eval_cons_k", "eval_pass_k"]


def eval_pass_k(rewards: Tensor, num_tests_per_prompt: int, k: int) -> float:
    """Return the sum over the prompts of pass@k.

    Args:
        rewards: [prompts * num_tests_per_prompt], 1 for correct answers.
        num_tests_per_prompt: Number of answers to each prompt.
        k: Size of the subsets.
    """
    groups = torch.split(rewards, num_tests_per_prompt)
    # Rounded, because pass_at_k counts in whole numbers, and rewards are floats.
    return sum(pass_at_k(len(g), round(float(g.sum())), k) for g in groups)


def eval_cons_k(
    rewards: Tensor,
    num_tests_per_prompt: int,
    k: int,
    extracted_answers: Sequence[str | None],
) -> float:
    """Return the sum over the prompts of cons@k; ties are broken at random.

    Args:
        rewards: [prompts * num_tests_per_prompt], 1 for correct answers.
        num_tests_per_prompt: Number of answers to each prompt.
        k: Size of the subsets.
        extracted_answers: The extracted answers; None does not vote.
    """
    total = 0.0
    for start in range(0, len(rewards), num_tests_per_prompt):
        part = slice(start, start + num_tests_per_prompt)
        answers = extracted_answers[part]
        if k > 1 and len(set(answers)) > 1:
            warn_difference(
                "eval_cons_k draws ties by lot, and None does not vote; in nemo_rl the "
                "answer that comes first wins, and None is one"
            )
        total += cons_at_k(answers, rewards[part].tolist(), k)
    return total
