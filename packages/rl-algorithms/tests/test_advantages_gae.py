"""GAE against the definition, summed forward in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rl_algorithms.advantages.gae import (
    final_values,
    gae,
    state_values,
    token_rewards,
)
from rl_algorithms.errors import LossInputError


def _rows(seed, num_rows=4, width=9):
    rng = np.random.default_rng(seed)
    mask = rng.random((num_rows, width)) < 0.6
    mask[:, 0] = False
    rewards, values = rng.normal(size=(2, num_rows, width))
    return [torch.from_numpy(x) for x in (rewards, values, mask.astype(np.float32))]


def _reference(rewards, values, mask, gamma, lam, last=(0.0,) * 4):
    """A_k = sum over l of (gamma lam)^l delta_(k+l), over the actions of each row."""
    advantages = np.zeros(mask.shape)
    for row in range(len(mask)):
        at = np.flatnonzero(mask[row])
        for k in range(len(at)):
            total = 0.0
            for l in range(k, len(at)):  # noqa: E741 - as the paper writes it
                after = values[row, at[l + 1]] if l + 1 < len(at) else last[row]
                delta = rewards[row, at[l]] + gamma * after - values[row, at[l]]
                total += (gamma * lam) ** (l - k) * delta
            advantages[row, at[k]] = total
    return advantages


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_agrees_with_the_definition(seed, gamma, lam):
    rewards, values, mask = _rows(seed)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    expected = _reference(rewards.numpy(), values.numpy(), mask.numpy(), gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-12)
    expected_returns = np.where(mask.numpy() != 0, expected + values.numpy(), 0.0)
    np.testing.assert_allclose(returns.numpy(), expected_returns, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    gamma=st.sampled_from([0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_a_row_that_was_cut_off_goes_on_with_its_last_value(seed, gamma, lam):
    """1712.00378: the last delta includes gamma times the value of what followed."""
    rewards, values, mask = _rows(seed)
    last = np.random.default_rng(seed + 1).normal(size=4)
    advantages, returns = gae(
        rewards, values, mask, gamma=gamma, lam=lam, last_values=torch.from_numpy(last)
    )
    columns = (rewards.numpy(), values.numpy(), mask.numpy())
    expected = _reference(*columns, gamma, lam, last)
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-12)
    expected_returns = np.where(mask.numpy() != 0, expected + values.numpy(), 0.0)
    np.testing.assert_allclose(returns.numpy(), expected_returns, atol=1e-12)


def test_the_last_value_is_that_after_the_last_action():
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    values = torch.arange(16.0).view(4, 4)
    cut_off = torch.tensor([True, True, False, True])
    assert final_values(values, mask, cut_off).tolist() == [2.0, 7.0, 0.0, 0.0]
    junk = torch.where(mask != 0, values, torch.nan)
    assert final_values(junk, mask, cut_off).tolist() == [2.0, 7.0, 0.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), extra=st.integers(0, 3))
def test_depends_on_actions_only(seed, extra):
    """Padding, junk at other tokens, other rows and gaps in rows have no effect."""
    rewards, values, mask = _rows(seed)
    expected, expected_returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(4))
    junk = torch.where(mask != 0, 0.0, torch.nan)
    wide = [
        torch.nn.functional.pad(x[order], (0, extra), value=filler)
        for x, filler in ((rewards + junk, 7.0), (values + junk, torch.nan), (mask, 0))
    ]
    advantages, returns = gae(*wide, gamma=0.9, lam=0.8)
    assert torch.equal(advantages[:, :9], expected[order])
    assert torch.equal(returns[:, :9], expected_returns[order])
    assert not advantages[:, 9:].any()
    for row in range(4):  # without the tokens in between
        kept = (mask[row] != 0) | (torch.arange(9) == 0)
        short, _ = gae(
            rewards[row, kept][None],
            values[row, kept][None],
            mask[row, kept][None],
            gamma=0.9,
            lam=0.8,
        )
        assert torch.equal(short[0], expected[row, kept])


def test_lambda_one_gives_the_reward_to_go_and_zero_one_step():
    rewards, values, mask = _rows(3)
    _, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    gained = torch.where(mask != 0, rewards, 0.0)
    to_go = gained.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns, torch.where(mask != 0, to_go, 0.0))


def test_token_rewards_and_alignment_of_values():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    kl = torch.full((3, 6), 0.25)
    found = token_rewards(torch.tensor([2.0, 5.0, -1.0]), mask, kl)
    assert found.tolist() == [
        [0, -0.25, -0.25, 0, 1.75, 0],
        [0, 0, 0, 0, 0, 0],
        [0, -1.25, 0, 0, 0, 0],
    ]
    assert found.dtype == torch.float64
    values = torch.tensor([[1.0, 2.0, 3.0]])
    assert state_values(values).tolist() == [[0.0, 1.0, 2.0]]


def test_shapes_must_agree():
    with pytest.raises(LossInputError, match="one shape"):
        gae(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3))
