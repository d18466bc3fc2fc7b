"""The rewards and environments of the guide to extensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_a_wrapped_reward_function(run_program: Callable[..., dict[str, Any]]) -> None:
    left = run_program("reward_wrapper")
    assert left["rewards"].tolist() == pytest.approx([0.8, 0.2])
    assert left["env"].name == "batch_scorer"


def test_a_whole_environment(
    run_program: Callable[..., dict[str, Any]], model: str
) -> None:
    result = run_program("whole_environment", model)["result"]
    history = result.history
    rewards = history.column("train:reward")[1]
    assert len(rewards) == 2
    assert history.column("train:env/mean_reward")[1] == pytest.approx(rewards)
