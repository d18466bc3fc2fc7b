from .baselines import (
    calculate_baseline_and_std_per_group as calculate_baseline_and_std_per_group,
    calculate_baseline_and_std_per_prompt as calculate_baseline_and_std_per_prompt,
)
from .batch_normalized import (
    GDPOAdvantageEstimator as GDPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator as ReinforcePlusPlusAdvantageEstimator,
)
from .config import (
    AdvantageConfig as AdvantageConfig,
    RewardScalingConfig as RewardScalingConfig,
    RewardShapingConfig as RewardShapingConfig,
)
from .estimators import (
    AdvantageEstimator as AdvantageEstimator,
    GRPOAdvantageEstimator as GRPOAdvantageEstimator,
    RawRewardAdvantageEstimator as RawRewardAdvantageEstimator,
    RewardColumns as RewardColumns,
)
from .factory import build_advantage_estimator as build_advantage_estimator
from .overlong import mask_overlong as mask_overlong, shape_rewards as shape_rewards
from .rewards import scale_rewards as scale_rewards
