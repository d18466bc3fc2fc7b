"""Reward functions of NeMo RL, `(ground_truth, response) -> (reward, is_correct)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from rl_envs.errors import RewardError

__all__ = ["combine_reward_functions"]

TheirReward: TypeAlias = Callable[[str, str], tuple[float, bool | None]]


def combine_reward_functions(
    reward_functions: Sequence[tuple[TheirReward, float]],
) -> Callable[[str, str], tuple[float, bool]]:
    """Combine reward functions into one.

    Args:
        reward_functions: Functions with their weights.

    Returns:
        A function whose reward is the weighted mean, and whose response is correct if
        it is for all functions that report correctness.

    Raises:
        RewardError: There are no functions, or the weights sum to 0.
    """
    total = sum(weight for _, weight in reward_functions)
    if not total:
        raise RewardError(
            "combine_reward_functions needs functions whose weights do not add up to "
            f"0: got {[weight for _, weight in reward_functions]}"
        )

    def combined(ground_truth: str, response: str) -> tuple[float, bool]:
        found = [(fn(ground_truth, response), w) for fn, w in reward_functions]
        reward = sum(value * weight for (value, _), weight in found) / total
        # None says nothing about correctness: such a function must not fail the
        # response.
        verdicts = [correct for (_, correct), _ in found if correct is not None]
        return float(reward), all(verdicts)

    return combined
