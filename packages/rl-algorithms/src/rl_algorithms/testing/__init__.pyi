from .batches import (
    LossBatch as LossBatch,
    RewardBatch as RewardBatch,
    reward_batch as reward_batch,
    token_batch as token_batch,
)
from .estimators import (
    ESTIMATOR_CHECKS as ESTIMATOR_CHECKS,
    check_estimator as check_estimator,
)
from .examples import ConformanceError as ConformanceError
from .losses import LOSS_CHECKS as LOSS_CHECKS, check_loss as check_loss
from .trainers import check_trainer as check_trainer, weights_digest as weights_digest
