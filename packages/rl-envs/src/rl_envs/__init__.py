"""Environments, rewards and verifiable tasks for language models.

Names are imported when they are first used, so that this import stays cheap.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_envs.errors import (
        EnvironmentContractError,
        MessageLogError,
        RewardCallError,
        RewardError,
        RewardSignatureError,
        RewardValueError,
        SolutionError,
        TaskError,
        ToolError,
        ToolUnavailableError,
    )
    from rl_envs.interfaces import (
        EnvironmentInterface,
        EnvironmentReturn,
        Message,
        MessageLog,
        Observation,
        last_response,
        observation_messages,
        prompt_text,
        scored_mask,
        total_reward,
    )
    from rl_envs.metrics import calculate_pass_rate_per_prompt, reward_metrics
    from rl_envs.registry import create_env, env_registry, register_env
    from rl_envs.remote import RemoteEnvironment
    from rl_envs.reward_file import FileReward, FileRewardConfig
    from rl_envs.rewards.environments import GroupRewardWrapper, as_environment
    from rl_envs.rewards.functional import FunctionalRewardWrapper, check_reward_fn
    from rl_envs.rewards.functions import (
        FormatReward,
        LengthPenalty,
        NumericMatch,
        combine_reward_functions,
        exact_match,
        numeric_match,
    )
    from rl_envs.rewards.lists import RewardList
    from rl_envs.tasks import Split, Task, TaskSource
    from rl_envs.testing import check_environment
    from rl_envs.tools.calls import JsonToolCallParser, ToolCall, ToolCallParser
    from rl_envs.tools.environment import ToolEnvironment, ToolLimits
    from rl_envs.tools.functions import Tool
    from rl_envs.worlds.calculator import (
        CalculatorConfig,
        CalculatorEnvironment,
        CalculatorTasks,
    )
    from rl_envs.worlds.math import MathConfig, MathEnvironment
    from rl_envs.worlds.sorting import SortingConfig, SortingEnvironment, SortingTasks

__all__ = [
    "EnvironmentInterface",
    "EnvironmentReturn",
    "Message",
    "MessageLog",
    "Observation",
    "last_response",
    "observation_messages",
    "prompt_text",
    "scored_mask",
    "total_reward",
    "FunctionalRewardWrapper",
    "FileReward",
    "FileRewardConfig",
    "GroupRewardWrapper",
    "RewardList",
    "as_environment",
    "check_reward_fn",
    "JsonToolCallParser",
    "Tool",
    "ToolCall",
    "ToolCallParser",
    "ToolEnvironment",
    "ToolLimits",
    "RemoteEnvironment",
    "create_env",
    "env_registry",
    "register_env",
    "check_environment",
    "calculate_pass_rate_per_prompt",
    "reward_metrics",
    "FormatReward",
    "LengthPenalty",
    "NumericMatch",
    "combine_reward_functions",
    "exact_match",
    "numeric_match",
    "Split",
    "Task",
    "TaskSource",
    "SolutionError",
    "SortingConfig",
    "SortingEnvironment",
    "SortingTasks",
    "CalculatorConfig",
    "CalculatorEnvironment",
    "CalculatorTasks",
    "MathConfig",
    "MathEnvironment",
    "EnvironmentContractError",
    "MessageLogError",
    "RewardCallError",
    "RewardError",
    "RewardSignatureError",
    "RewardValueError",
    "TaskError",
    "ToolError",
    "ToolUnavailableError",
    "__version__",
]

__version__ = version("rl-envs")

_MODULES = {
    "errors": (
        "EnvironmentContractError MessageLogError RewardCallError RewardError "
        "RewardSignatureError RewardValueError SolutionError TaskError ToolError "
        "ToolUnavailableError"
    ),
    "rewards.functional": "FunctionalRewardWrapper check_reward_fn",
    "interfaces": (
        "EnvironmentInterface EnvironmentReturn Message MessageLog Observation "
        "last_response observation_messages prompt_text scored_mask total_reward"
    ),
    "metrics": "calculate_pass_rate_per_prompt reward_metrics",
    "registry": "create_env env_registry register_env",
    "remote": "RemoteEnvironment",
    "rewards.environments": "GroupRewardWrapper as_environment",
    "reward_file": "FileReward FileRewardConfig",
    "rewards.lists": "RewardList",
    "rewards.functions": (
        "FormatReward LengthPenalty NumericMatch combine_reward_functions exact_match "
        "numeric_match"
    ),
    "tasks": "Split Task TaskSource",
    "testing": "check_environment",
    "tools.calls": "JsonToolCallParser ToolCall ToolCallParser",
    "tools.functions": "Tool",
    "tools.environment": "ToolEnvironment ToolLimits",
    "worlds.calculator": "CalculatorConfig CalculatorEnvironment CalculatorTasks",
    "worlds.math": "MathConfig MathEnvironment",
    "worlds.sorting": "SortingConfig SortingEnvironment SortingTasks",
}
_MODULE_OF = {
    name: module for module, names in _MODULES.items() for name in names.split()
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
