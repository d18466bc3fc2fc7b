"""Exceptions of rl-envs.

```
EnvsError                     (a DistributedError)  root of all of them
├── RewardError               UserError, ValueError   a reward function is wrong
│   ├── RewardSignatureError  TypeError     its parameters cannot be filled
│   ├── RewardCallError       RuntimeError  it raised, or did not finish in time
│   └── RewardValueError                    its result is not a valid reward
├── EnvironmentContractError  UserError, ValueError   an interface is broken
├── MessageLogError           UserError, ValueError   a conversation is incomplete
├── SolutionError             UserError, ValueError   reference solutions are unreadable
├── SandboxError              UserError, RuntimeError  the level cannot be reached
├── JudgeError                UserError, RuntimeError  a judge does not answer
├── EnvironmentServerError    UserError, ConnectionError  a server of environments
├── TaskError                 UserError, ValueError   a request for tasks is invalid
├── ToolError                 UserError, ValueError   a function cannot be a tool
├── AgentError                RuntimeError  an agent raised, or gave no reward
│   └── AgentSetupError       UserError, ValueError   it cannot be run at all
├── PythonFileError           UserError, ImportError  (python_file)
├── ActionRefusedError        ValueError    (bridges.openenv.wire, as the next four)
├── StepFailedError           RuntimeError  the environment of a server raised
├── SessionLostError          RuntimeError  a session with a server is over
├── NoReplyError              TimeoutError  a server does not answer in time
├── ServerFullError           RuntimeError  a server has no room for a session
├── ToolArgumentError         a model passed invalid arguments (tools.functions)
├── Unreadable                ValueError    a text is not an answer (mathematics.values)
├── NotJsonError              ValueError    a text is not one JSON value (json_checks)
├── UnusableSchemaError       ValueError    a schema is invalid (json_checks)
├── ExpressionError           ValueError    a text is not arithmetic (worlds.countdown)
├── CellUndoneError           RuntimeError  a cell hit a limit (worlds.code_interpreter)
├── BoardError                ValueError    a text is no board (worlds.sliding_puzzle)
└── ToolUnavailableError      RuntimeError  a tool does not work, whatever the call
```

`UserError` marks input that the caller can fix (exit code 2 in the CLI). All errors can
be pickled, because they cross processes. Dead workers and exceeded deadlines are errors
of rl-distributed.
"""

from __future__ import annotations

from rl_distributed.errors import DistributedError, UserError

__all__ = [
    "AgentError",
    "AgentSetupError",
    "EnvironmentContractError",
    "EnvironmentServerError",
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
    """A reward function is wrong."""


class RewardSignatureError(RewardError, TypeError):
    """The parameters of a reward function cannot be filled."""


class RewardCallError(RewardError, RuntimeError):
    """A reward function raised, or did not finish in time."""


class RewardValueError(RewardError):
    """A reward function returned an invalid reward: NaN, a wrong type or length."""


class EnvironmentContractError(EnvsError, UserError, ValueError):
    """An environment breaks its interface."""


class MessageLogError(EnvsError, UserError, ValueError):
    """A conversation has no response, or a message lacks a field."""


class SolutionError(EnvsError, UserError, ValueError):
    """Reference solutions of rows cannot be read by the environment."""


class SandboxError(EnvsError, UserError, RuntimeError):
    """The requested sandbox level is not available, or the sandbox is closed."""


class JudgeError(EnvsError, UserError, RuntimeError):
    """A judge model cannot be reached, refuses, or may not be called."""


class EnvironmentServerError(EnvsError, UserError, ConnectionError):
    """A server of environments is out of reach, or does not speak its protocol."""


class TaskError(EnvsError, UserError, ValueError):
    """A request for tasks is invalid."""


class ToolError(EnvsError, UserError, ValueError):
    """A function cannot be described to a model as a tool."""


class AgentError(EnvsError, RuntimeError):
    """An agent raised, or gave no reward.

    The policy is neither rewarded nor blamed for it.
    """


class AgentSetupError(AgentError, UserError, ValueError):
    """No task of an agent can be run: its parameters, a package, the address."""


class ToolUnavailableError(EnvsError, RuntimeError):
    """A tool does not work, through no fault of the call, as when its service is down.

    A tool that raises it ends the conversation without a score, so that the policy is
    neither rewarded nor penalized.
    """
