"""Exceptions of rl-envs.

```
EnvsError                     (a rl_distributed.DistributedError)  root of all of them
├── RewardError               UserError, ValueError   a reward function is wrong
│   ├── RewardSignatureError  TypeError     its parameters cannot be filled
│   ├── RewardCallError       RuntimeError  it raised, or did not finish in time
│   └── RewardValueError                    what it returned is no reward
├── EnvironmentContractError  UserError, ValueError   its interface is broken
├── MessageLogError           UserError, ValueError   a conversation lacks a part
├── SolutionError             UserError, ValueError   solutions of rows cannot be read
├── SandboxError              UserError, RuntimeError  it cannot confine as asked
├── JudgeError                UserError, RuntimeError  a judge does not answer
├── TaskError                 UserError, ValueError   tasks cannot be made as asked
├── ToolError                 UserError, ValueError   a function cannot be a tool
├── AgentError                RuntimeError  an agent raised, or gave no reward
│   └── AgentSetupError       UserError, ValueError   it cannot be run at all
├── PythonFileError           UserError, ImportError  (python_file)
├── ToolArgumentError         what a model passed does not fit (tools.functions)
├── Unreadable                ValueError    a text is no answer (mathematics.values)
├── NotJsonError              ValueError    a text is not one JSON value (json_checks)
├── UnusableSchemaError       ValueError    a schema has no meaning (json_checks)
├── ExpressionError           ValueError    a text is no arithmetic (worlds.countdown)
├── CellUndoneError           RuntimeError  a cell met a limit (worlds.code_interpreter)
├── BoardError                ValueError    a text is no board (worlds.sliding_puzzle)
└── ToolUnavailableError      RuntimeError  a tool cannot work, whatever the call
```

`UserError` marks input that the caller can mend (exit code 2 in the CLI).
All can be pickled, because they cross processes. A worker that dies or a wait that ends
are errors of rl-distributed.
"""

from __future__ import annotations

from rl_distributed.errors import DistributedError, UserError

__all__ = [
    "AgentError",
    "AgentSetupError",
    "EnvironmentContractError",
    "EnvsError",
    "JudgeError",
    "MessageLogError",
    "RewardCallError",
    "RewardError",
    "RewardSignatureError",
    "RewardValueError",
    "SandboxError",
    "SolutionError",
    "TaskError",
    "ToolError",
    "ToolUnavailableError",
]


class EnvsError(DistributedError):
    """Root of the errors of environments, rewards and tools."""


class RewardError(EnvsError, UserError, ValueError):
    """Something is wrong with a reward function."""


class RewardSignatureError(RewardError, TypeError):
    """The parameters of a reward function cannot be filled."""


class RewardCallError(RewardError, RuntimeError):
    """A reward function raised, or did not finish in time."""


class RewardValueError(RewardError):
    """What a reward function returned is no reward: NaN, a wrong type or length."""


class EnvironmentContractError(EnvsError, UserError, ValueError):
    """An environment breaks its interface."""


class MessageLogError(EnvsError, UserError, ValueError):
    """A conversation has no response, or a message lacks a field."""


class SolutionError(EnvsError, UserError, ValueError):
    """The solutions of rows have no meaning for the environment that compares them."""


class SandboxError(EnvsError, UserError, RuntimeError):
    """The sandbox cannot be had at the level that is asked for, or cannot be used."""


class JudgeError(EnvsError, UserError, RuntimeError):
    """A language model that judges is not there, refuses, or may not be asked."""


class TaskError(EnvsError, UserError, ValueError):
    """Tasks cannot be made as asked."""


class ToolError(EnvsError, UserError, ValueError):
    """A function cannot be described to a model as a tool."""


class AgentError(EnvsError, RuntimeError):
    """An agent raised, or gave no reward.

    The policy is neither rewarded nor blamed for it.
    """


class AgentSetupError(AgentError, UserError, ValueError):
    """No task of an agent can be run: its parameters, a package, the address."""


class ToolUnavailableError(EnvsError, RuntimeError):
    """A tool cannot work, through no fault of the call: its service is down.

    Raised by a tool, it ends the conversation without a score, so that the policy is
    neither rewarded nor blamed for it.
    """
