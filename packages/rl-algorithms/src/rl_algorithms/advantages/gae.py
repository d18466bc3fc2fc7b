"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438) over tokens.

The actions of a row are its sampled tokens, in order: those with `token_mask` 1. What
lies between two of them (what the environment said between two turns) is part of the
transition and no step of its own, so gamma and lambda do not count it. With
`V_k` the value of the state in which action k is chosen, and n actions:

```
delta_k = r_k + gamma V_(k+1) - V_k
A_k     = delta_k + gamma lambda A_(k+1)
return  = A_k + V_k
```

The last action ends the episode, so `V_(n+1) = 0`, unless the caller says otherwise: of
a row that a limit cut off it may be what the critic says of its last state (Pardo et
al., arXiv:1712.00378). Everything is computed in float64. Shapes: N rows, S tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_algorithms.advantages.kl_in_reward import token_rewards_after_kl
from rl_algorithms.errors import LossInputError

__all__ = ["final_values", "gae", "state_values", "token_rewards"]


def state_values(values: Tensor) -> Tensor:
    """Align `get_values` with tokens: entry i is the state in which token i is chosen.

    Args:
        values: [N, S] of `get_values`: entry i is that after tokens 0 to i.

    Returns:
        [N, S] with 0.0 at position 0.
    """
    return pad(values[:, :-1], (1, 0))


def final_values(values: Tensor, token_mask: Tensor, cut_off: Tensor) -> Tensor:
    """Return what the critic says of the state after the last action of each row.

    Args:
        values: [N, S] of `get_values`: entry i is that after tokens 0 to i.
        token_mask: [N, S] 1 on actions.
        cut_off: [N] whether the row went on, had no limit ended it.

    Returns:
        [N], 0.0 where the row ended by itself or has no action.
    """
    actions = _actions(token_mask)
    last = _last_action(actions)
    found = values.gather(1, last.clamp(min=0)).squeeze(1)
    return torch.where(cut_off & (last.squeeze(1) >= 0), found, 0.0)


def token_rewards(
    rewards: Tensor, token_mask: Tensor, kl_penalty: Tensor | None = None
) -> Tensor:
    """Give an answer's reward to its last action, and its KL penalty to each.

    Args:
        rewards: [N] rewards of whole rows.
        token_mask: [N, S] 1 on actions.
        kl_penalty: [N, S] what each action takes from the reward; default nothing.

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
        rewards: [N, S] of each action, see `token_rewards`.
        values: [N, S] of the state in which each is chosen, see `state_values`.
        token_mask: [N, S] 1 on actions; what the others hold plays no part.
        gamma: Discount of an action's future.
        lam: 0 trusts the values alone, 1 the rewards alone.
        last_values: [N] of the state after a row's last action, see `final_values`;
            default 0.0, the end of the episode.

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
    # By columns, which are contiguous then.
    r = torch.where(actions, rewards.double(), 0.0).T.contiguous()
    v = torch.where(actions, values.double(), 0.0).T.contiguous()
    acts = actions.T.contiguous()
    advantages = torch.zeros_like(v)
    following = next_value = v.new_zeros(v.shape[1])
    if last_values is not None:
        next_value = last_values.to(v)
    for i in reversed(range(v.shape[0])):
        delta = r[i] + gamma * next_value - v[i]
        following = torch.where(acts[i], delta + gamma * lam * following, following)
        next_value = torch.where(acts[i], v[i], next_value)
        advantages[i] = torch.where(acts[i], following, 0.0)
    return advantages.T.contiguous(), (advantages + v).T.contiguous()


def _last_action(actions: Tensor) -> Tensor:
    """[N, 1] column of each row's last action, -1 without one."""
    columns = torch.arange(actions.shape[1])
    return torch.where(actions, columns, -1).amax(dim=1, keepdim=True)


def _actions(token_mask: Tensor) -> Tensor:
    """Which tokens are actions; the first token of a row follows no state."""
    actions = token_mask != 0
    actions[:, 0] = False
    return actions
