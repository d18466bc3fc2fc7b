"""Uninformative rewards are detected and reported once."""

from __future__ import annotations

import pytest
import torch

from rl_algorithms.trainers.sampling.reward_watch import RewardWatch

NAN = float("nan")


def rows(rewards, mask=None, **named):
    size = len(rewards)
    return {
        "rewards": torch.tensor(rewards),
        "sample_mask": torch.tensor(mask or [1.0] * size),
        "group_index": torch.arange(size) // 2,
        **{f"reward/{name}": torch.tensor(values) for name, values in named.items()},
    }


def said(steps, **options):
    """Return the messages after each step; a step is one or several rollouts."""
    watch = RewardWatch(**options)
    found = []
    for step in steps:
        for part in step if isinstance(step, list) else [step]:
            watch.note(part)
        found.append(watch.end_step())
    return found


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5])
def test_equal_rewards_are_said_once(value):
    found = said([rows([value] * 4)] * 9)
    assert [bool(text) for text in found] == [False] * 4 + [True] + [False] * 4
    assert found[4].startswith(
        "nothing to learn from: all 20 answers of the last 5 steps got the same reward "
        f"({value:g}); look at answers and their rewards"
    )


def test_all_parts_of_a_step_count():
    part = rows([0.0] * 4)
    assert "all 40 answers" in said([[part, part]] * 5)[-1]
    assert said([[part, rows([0.0, 1.0])]] * 6) == [None] * 6


@pytest.mark.parametrize(
    "different",
    [
        rows([0.0, 0.0, 0.0, 1.0]),
        rows([1.0, 1.0, 1.0, 1.0]),
        rows([0.0] * 4, mask=[0.0] * 4),
    ],
)
def test_one_other_step_is_enough_for_silence(different):
    flat = rows([0.0] * 4)
    found = said([flat, different, flat, flat, flat, flat])
    assert found == [None] * 6
    assert said([flat, different, *[flat] * 5])[-1] is not None


def test_answers_that_failed_do_not_count():
    assert "all 10 answers" in said([rows([1.0, 1.0, 0.0], [1.0, 1.0, 0.0])] * 5)[-1]


def test_groups_count_where_answers_are_compared_within_them():
    apart = rows([0.0, 0.0, 1.0, 1.0])
    assert said([apart] * 6) == [None] * 6
    (*_, last) = said([apart] * 5, compares_groups=True)
    assert "each of the 10 groups of the last 5 steps all answers got the sam" in last
    mixed = rows([0.0, 1.0, 1.0, 1.0])
    assert said([mixed] * 6, compares_groups=True) == [None] * 6


def test_each_of_several_rewards_counts():
    # Their sum is constant.
    found = said([rows([1.0] * 2, a=[0.0, 1.0], b=[1.0, 0.0])] * 6)
    assert found == [None] * 6
    flat = rows([1.0] * 2, a=[0.5, NAN], b=[0.5, 0.5])
    assert (
        "all 10 answers of the last 5 steps got the same reward;"
        in said([flat] * 5)[-1]
    )
