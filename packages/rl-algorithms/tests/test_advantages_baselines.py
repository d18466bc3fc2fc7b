from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rl_algorithms.advantages.baselines import (
    calculate_baseline_and_std_per_group,
    calculate_baseline_and_std_per_prompt,
)
from rl_algorithms.errors import LossInputError


def reference(groups, rewards, valid, leave_one_out):
    """Compute row by row with the standard library, per the module's table."""
    baselines, stds = [], []
    for i, group in enumerate(groups):
        members = [j for j, g in enumerate(groups) if g == group and valid[j]]
        others = [j for j in members if not (leave_one_out and j == i)]
        whole = [rewards[j] for j in members]
        chosen = [rewards[j] for j in others]
        baselines.append(statistics.fmean(chosen or [rewards[i]]))
        std = statistics.stdev(chosen) if len(chosen) > 1 else 0.0
        if std == 0.0 and len(whole) > 1:
            std = statistics.stdev(whole)
        stds.append(std)
    return baselines, stds


batches = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([0.0, 0.25, 0.5, 1.0, -2.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(batches, st.booleans())
def test_against_a_loop_over_rows(rows, leave_one_out):
    groups, rewards, valid = zip(*rows, strict=True)
    baseline, std = calculate_baseline_and_std_per_group(
        torch.tensor(groups),
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(valid),
        leave_one_out,
    )
    want_baseline, want_std = reference(groups, rewards, valid, leave_one_out)
    assert baseline.tolist() == pytest.approx(want_baseline, abs=1e-12)
    assert std.tolist() == pytest.approx(want_std, abs=1e-7)


@settings(max_examples=50, deadline=None)
@given(batches, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)

    def results(rows):
        groups, rewards, valid = zip(*rows, strict=True)
        baseline, std = calculate_baseline_and_std_per_group(
            torch.tensor(groups) * 7 - 3,
            torch.tensor(rewards, dtype=torch.float64),
            torch.tensor(valid),
        )
        return baseline.tolist(), std.tolist()

    baseline, std = results(rows)
    shuffled_baseline, shuffled_std = results([rows[i] for i in order])
    assert shuffled_baseline == pytest.approx([baseline[i] for i in order])
    assert shuffled_std == pytest.approx([std[i] for i in order], abs=1e-7)


def test_the_example_of_four():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    baseline, std = calculate_baseline_and_std_per_group(torch.zeros(4), rewards)
    assert baseline.tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1 / 3])
    assert std.tolist() == pytest.approx([3**-0.5] * 4)
    assert ((rewards - baseline) / std).abs().tolist() == pytest.approx([1.1547] * 4)


def test_a_group_of_one_and_a_group_of_two():
    baseline, std = calculate_baseline_and_std_per_group(
        torch.tensor([0, 1, 1]), torch.tensor([5.0, 1.0, 0.0])
    )
    assert baseline.tolist() == [5.0, 0.0, 1.0]
    assert std.tolist() == pytest.approx([0.0, 0.5**0.5, 0.5**0.5])


def test_rounding_is_no_spread():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3], dtype=torch.float64) + 1e4
    for leave_one_out in (True, False):
        _, std = calculate_baseline_and_std_per_group(
            torch.zeros(4), rewards, None, leave_one_out
        )
        assert std.tolist() == [0.0] * 4


def test_large_offsets_cost_no_accuracy():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    _, std = calculate_baseline_and_std_per_group(torch.zeros(4), rewards + 1e5)
    assert std.tolist() == pytest.approx([3**-0.5] * 4, rel=1e-9)


def test_spread_of_other_rewards_than_the_baseline():
    rewards = torch.tensor([1.0, 3.0, 5.0])
    raw = torch.tensor([0.0, 0.0, 1.0])
    baseline, std = calculate_baseline_and_std_per_group(
        torch.zeros(3), rewards, None, False, raw
    )
    assert baseline.tolist() == [3.0] * 3
    assert std.tolist() == pytest.approx([3**-0.5] * 3)


def test_per_prompt_groups_by_equal_tokens():
    prompts = torch.tensor([[1, 2], [3, 4], [1, 2]])
    baseline, _ = calculate_baseline_and_std_per_prompt(
        prompts, torch.tensor([1.0, 7.0, 3.0]), torch.ones(3), False
    )
    assert baseline.tolist() == [2.0, 7.0, 2.0]


def test_an_empty_batch_and_wrong_shapes():
    baseline, std = calculate_baseline_and_std_per_group(
        torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    )
    assert baseline.shape == std.shape == (0,)
    with pytest.raises(LossInputError, match="group_index must have the shape"):
        calculate_baseline_and_std_per_group(torch.zeros(3), torch.zeros(4))
    with pytest.raises(LossInputError, match=r"prompts must be \[N, S\]"):
        calculate_baseline_and_std_per_prompt(
            torch.zeros(3), torch.zeros(4), torch.ones(4)
        )
