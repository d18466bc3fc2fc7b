"""Generalized advantage estimation (Schulman et al., arXiv:1506.02438) over tokens.

The actions of a row are its sampled tokens in order, those with `token_mask` 1. Tokens
between two of them (messages of the environment between two turns) are part of the
transition, so gamma and lambda do not apply to them. With `V_k` the value of the state
in which action k is chosen, and n actions:

```
delta_k = r_k + gamma V_(k+1) - V_k
A_k     = delta_k + gamma lambda A_(k+1)
return  = A_k + V_k
```

The last action ends the episode, so `V_(n+1) = 0` by default. For a row cut off by a
limit it may be the critic's value of the last state (Pardo et al., arXiv:1712.00378).
Everything is computed in float64, because errors accumulate over thousands of tokens.
Shapes: N rows, S tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_algorithms.advantages.kl_in_reward import token_rewards_after_kl
from rl_algorithms.errors import LossInputError

__all__ = ["final_values", "gae", "state_values", "token_rewards"]


def state_values(values: Tensor) -> Tensor:
    """Align values with tokens: entry i is of the state in which token i is chosen.

    Args:
        values: [N, S] from `get_values`; entry i is of the state after tokens 0 to i.

    Returns:
        [N, S] with 0.0 at position 0.
    """
    return pad(values[:, :-1], (1, 0))


def final_values(values: Tensor, token_mask: Tensor, cut_off: Tensor) -> Tensor:
    """Return the critic's value of the state after the last action of each row.

    Args:
        values: [N, S] from `get_values`; entry i is of the state after tokens 0 to i.
        token_mask: [N, S], 1 on actions.
        cut_off: [N] whether a limit ended the row.

    Returns:
        [N], 0.0 where the row ended by itself or has no action.
    """
    actions = _actions(token_mask)
    last = _last_action(actions)
    # A row without an action has -1, which gather refuses; `where` discards what it
    # reads.
    found = values.gather(1, last.clamp(min=0)).squeeze(1)
    return torch.where(cut_off & (last.squeeze(1) >= 0), found, 0.0)


def token_rewards(
    rewards: Tensor, token_mask: Tensor, kl_penalty: Tensor | None = None
) -> Tensor:
    """Assign an answer's reward to its last action, and KL penalties to each action.

    Args:
        rewards: [N] rewards of whole rows.
        token_mask: [N, S], 1 on actions.
        kl_penalty: [N, S] penalty of each action; by default none.

    Returns:
        [N, S] float64, 0.0 where there is no action.
    """
    actions = _actions(token_mask)
    columns = torch.arange(actions.shape[1])
    ends = actions & (columns == _last_action(actions))
    found = torch.where(ends, rewards.double()[:, None], 0.0)
    return token_rewards_after_kl(found, kl_penalty, actions)


def gae(
    rewards: Tensor,
    values: Tensor,
    token_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns of all actions.

    Args:
        rewards: [N, S] reward of each action, see `token_rewards`.
        values: [N, S] value of the state in which each is chosen, see `state_values`.
        token_mask: [N, S], 1 on actions; values of other tokens are ignored.
        gamma: Discount per action.
        lam: 0 relies on the values alone, 1 on the rewards alone.
        last_values: [N] value of the state after a row's last action, see
            `final_values`; by default 0.0, the end of the episode.

    Returns:
        Advantages and returns, [N, S] float64 each, 0.0 where there is no action.

    Raises:
        LossInputError: The shapes differ.
    """
    if rewards.shape != token_mask.shape or values.shape != token_mask.shape:
        raise LossInputError(
            "gae takes rewards, values and token_mask of one shape [N, S]: got "
            f"{list(rewards.shape)}, {list(values.shape)} and {list(token_mask.shape)}"
        )
    actions = _actions(token_mask)
    # Transposed, so that each step of the loop reads contiguous memory.
    r = torch.where(actions, rewards.double(), 0.0).T.contiguous()
    v = torch.where(actions, values.double(), 0.0).T.contiguous()
    acts = actions.T.contiguous()
    advantages = torch.zeros_like(v)
    following = next_value = v.new_zeros(v.shape[1])
    if last_values is not None:
        next_value = last_values.to(v)
    for i in reversed(range(v.shape[0])):
        delta = r[i] + gamma * next_value - v[i]
        # Where there is no action, both carry over: the gap is part of the transition.
        following = torch.where(acts[i], delta + gamma * lam * following, following)
        next_value = torch.where(acts[i], v[i], next_value)
        advantages[i] = torch.where(acts[i], following, 0.0)
    return advantages.T.contiguous(), (advantages + v).T.contiguous()


def _last_action(actions: Tensor) -> Tensor:
    """Return [N, 1], the column of each row's last action; -1 without one."""
    columns = torch.arange(actions.shape[1])
    return torch.where(actions, columns, -1).amax(dim=1, keepdim=True)


def _actions(token_mask: Tensor) -> Tensor:
    """Return [N, S], whether a token is an action; the first of a row has no state."""
    actions = token_mask != 0
    # The comparison above made a new tensor, so the caller's mask stays as it is.
    actions[:, 0] = False
    return actions
