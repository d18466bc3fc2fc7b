"""Exceptions of rl-envs.

```
rl_distributed.errors.UserError
├── RewardError             ValueError     something is wrong with a reward function
│   ├── RewardSignatureError  TypeError    its parameters cannot be filled
│   ├── RewardCallError       RuntimeError it raised, or did not finish in time
│   └── RewardValueError                   what it returned is no reward
├── EnvironmentContractError  ValueError   an environment breaks its interface
├── MessageLogError           ValueError   a conversation lacks what is needed
├── SolutionError             ValueError   the solutions of rows cannot be read
├── ToolError                 ValueError   a function cannot be a tool
└── TaskError                 ValueError   tasks cannot be made as asked

rl_distributed.errors.DistributedError
└── ToolUnavailableError    RuntimeError   a tool cannot work, whatever the call
```

All can be pickled, because they cross processes. A worker that dies or a wait that ends
are errors of rl-distributed.
"""

from __future__ import annotations

from rl_distributed.errors import DistributedError, UserError

__all__ = [
    "EnvironmentContractError",
    "MessageLogError",
    "RewardCallError",
    "RewardError",
    "RewardSignatureError",
    "RewardValueError",
    "SolutionError",
    "TaskError",
    "ToolError",
    "ToolUnavailableError",
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


class SolutionError(UserError, ValueError):
    """The solutions of rows have no meaning for the environment that compares them."""


class TaskError(UserError, ValueError):
    """Tasks cannot be made as asked."""


class ToolError(UserError, ValueError):
    """A function cannot be described to a model as a tool."""


class ToolUnavailableError(DistributedError, RuntimeError):
    """A tool cannot work, through no fault of the call: its service is down.

    Raised by a tool, it ends the conversation without a score, so that the policy is
    neither rewarded nor blamed for it.
    """
