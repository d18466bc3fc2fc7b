"""Advantages: how much better an answer is than the others to the same prompt."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_algorithms.advantages.baselines import (
        calculate_baseline_and_std_per_group,
        calculate_baseline_and_std_per_prompt,
    )
    from rl_algorithms.advantages.batch_normalized import (
        GDPOAdvantageEstimator,
        ReinforcePlusPlusAdvantageEstimator,
    )
    from rl_algorithms.advantages.config import (
        AdvantageConfig,
        RewardScalingConfig,
        RewardShapingConfig,
    )
    from rl_algorithms.advantages.estimators import (
        AdvantageEstimator,
        GRPOAdvantageEstimator,
        RawRewardAdvantageEstimator,
        RewardColumns,
    )
    from rl_algorithms.advantages.factory import make_advantage_estimator
    from rl_algorithms.advantages.rewards import scale_rewards, shape_rewards

__all__ = [
    "AdvantageConfig",
    "AdvantageEstimator",
    "GDPOAdvantageEstimator",
    "GRPOAdvantageEstimator",
    "RawRewardAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
    "RewardColumns",
    "RewardScalingConfig",
    "RewardShapingConfig",
    "calculate_baseline_and_std_per_group",
    "calculate_baseline_and_std_per_prompt",
    "make_advantage_estimator",
    "scale_rewards",
    "shape_rewards",
]

_MODULES = {
    "AdvantageConfig": "config",
    "AdvantageEstimator": "estimators",
    "GDPOAdvantageEstimator": "batch_normalized",
    "GRPOAdvantageEstimator": "estimators",
    "RawRewardAdvantageEstimator": "estimators",
    "ReinforcePlusPlusAdvantageEstimator": "batch_normalized",
    "RewardColumns": "estimators",
    "RewardScalingConfig": "config",
    "RewardShapingConfig": "config",
    "calculate_baseline_and_std_per_group": "baselines",
    "calculate_baseline_and_std_per_prompt": "baselines",
    "make_advantage_estimator": "factory",
    "scale_rewards": "rewards",
    "shape_rewards": "rewards",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
