"""Exceptions of rl-envs.

```
rl_distributed.errors.UserError
├── RewardError             ValueError     something is wrong with a reward function
│   ├── RewardSignatureError  TypeError    its parameters cannot be filled
│   ├── RewardCallError       RuntimeError it raised, or did not finish in time
│   └── RewardValueError                   what it returned is no reward
├── EnvironmentContractError  ValueError   an environment breaks its interface
├── MessageLogError           ValueError   a conversation lacks what is needed
└── TaskError                 ValueError   tasks cannot be made as asked
```

All can be pickled, because they cross processes. A worker that dies or a wait that ends
are errors of rl-distributed.
"""

from __future__ import annotations

from rl_distributed.errors import UserError

__all__ = [
    "EnvironmentContractError",
    "MessageLogError",
    "RewardCallError",
    "RewardError",
    "RewardSignatureError",
    "RewardValueError",
    "TaskError",
]


class RewardError(UserError, ValueError):
    """Something is wrong with a reward function."""


class RewardSignatureError(RewardError, TypeError):
    """The parameters of a reward function cannot be filled."""


class RewardCallError(RewardError, RuntimeError):
    """A reward function raised, or did not finish in time."""


class RewardValueError(RewardError):
    """What a reward function returned is no reward: NaN, a wrong type or length."""


class EnvironmentContractError(UserError, ValueError):
    """An environment breaks its interface."""


class MessageLogError(UserError, ValueError):
    """A conversation has no response, or a message lacks a field."""


class TaskError(UserError, ValueError):
    """Tasks cannot be made as asked."""
