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
        TaskError,
    )
    from rl_envs.functional_reward import FunctionalRewardWrapper, check_reward_fn
    from rl_envs.interfaces import (
        EnvironmentInterface,
        EnvironmentReturn,
        Message,
        MessageLog,
        last_response,
        prompt_text,
        scored_mask,
        total_reward,
    )
    from rl_envs.metrics import calculate_pass_rate_per_prompt, reward_metrics
    from rl_envs.registry import create_env, env_registry, register_env
    from rl_envs.remote import RemoteEnvironment
    from rl_envs.rewards import (
        FormatReward,
        LengthPenalty,
        NumericMatch,
        combine_reward_functions,
        exact_match,
        numeric_match,
    )
    from rl_envs.tasks import Split, Task, TaskSource
    from rl_envs.testing import check_environment
    from rl_envs.worlds.sorting import SortingConfig, SortingEnvironment, SortingTasks

__all__ = [
    "EnvironmentInterface",
    "EnvironmentReturn",
    "Message",
    "MessageLog",
    "last_response",
    "prompt_text",
    "scored_mask",
    "total_reward",
    "FunctionalRewardWrapper",
    "check_reward_fn",
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
    "SortingConfig",
    "SortingEnvironment",
    "SortingTasks",
    "EnvironmentContractError",
    "MessageLogError",
    "RewardCallError",
    "RewardError",
    "RewardSignatureError",
    "RewardValueError",
    "TaskError",
    "__version__",
]

__version__ = version("rl-envs")

_MODULES = {
    "errors": (
        "EnvironmentContractError MessageLogError RewardCallError RewardError "
        "RewardSignatureError RewardValueError TaskError"
    ),
    "functional_reward": "FunctionalRewardWrapper check_reward_fn",
    "interfaces": (
        "EnvironmentInterface EnvironmentReturn Message MessageLog last_response "
        "prompt_text scored_mask total_reward"
    ),
    "metrics": "calculate_pass_rate_per_prompt reward_metrics",
    "registry": "create_env env_registry register_env",
    "remote": "RemoteEnvironment",
    "rewards": (
        "FormatReward LengthPenalty NumericMatch combine_reward_functions exact_match "
        "numeric_match"
    ),
    "tasks": "Split Task TaskSource",
    "testing": "check_environment",
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
