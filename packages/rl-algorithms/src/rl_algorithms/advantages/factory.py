"""Construction of the advantage estimator from its configuration."""

from __future__ import annotations

from rl_algorithms.advantages.batch_normalized import (
    GDPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from rl_algorithms.advantages.config import AdvantageConfig
from rl_algorithms.advantages.estimators import (
    AdvantageEstimator,
    GRPOAdvantageEstimator,
    RawRewardAdvantageEstimator,
)

__all__ = ["build_advantage_estimator"]


def build_advantage_estimator(config: AdvantageConfig) -> AdvantageEstimator:
    """Return the estimator that `config.name` names."""
    if config.name == "gdpo":
        return GDPOAdvantageEstimator(config)
    if config.name == "reinforce_plus_plus":
        return ReinforcePlusPlusAdvantageEstimator(config)
    if config.name == "raw_reward":
        return RawRewardAdvantageEstimator(config)
    return GRPOAdvantageEstimator(config)
