"""The loop of the API documentation: each part accepts the others' output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_the_loop_learns(
    run_program: Callable[..., dict[str, Any]], model: str
) -> None:
    left = run_program("written_loop", model)
    means = left["means"]
    assert len(means) == 20
    assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + 0.2
    # Texts and solutions have travelled with the batch.
    assert left["generations"]["answer"] == ["7"] * 32
    assert all(isinstance(text, str) for text in left["generations"]["response"])
    assert left["policy"].weight_version == 20


@pytest.mark.slow
def test_the_loop_as_it_stands_there(
    run_program: Callable[..., dict[str, Any]], model: str
) -> None:
    left = run_program("written_loop_vllm", model)
    assert left["versions"] == [[0, 0, 0], [1, 1, 1]]
    assert left["rewards"].rewards.shape == (3,)
    assert left["generations"]["answer"] == ["6", "8", "10"]
