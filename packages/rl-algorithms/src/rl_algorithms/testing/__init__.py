"""What trainers, losses and estimators must hold, as checks that run on anybody's.

| check | what it is run on |
|---|---|
| `check_trainer` | a trainer: hooks in pairs, bitwise resume |
| `check_loss` | a loss: its paper's formula, its gradient, independence |
| `check_estimator` | an advantage estimator, likewise |

`check_loss` and `check_estimator` need `hypothesis`; each raises `ConformanceError`,
which names the rule that was broken.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_algorithms.testing.batches import (
        LossBatch,
        RewardBatch,
        reward_batch,
        token_batch,
    )
    from rl_algorithms.testing.estimators import ESTIMATOR_CHECKS, check_estimator
    from rl_algorithms.testing.examples import ConformanceError
    from rl_algorithms.testing.losses import LOSS_CHECKS, check_loss
    from rl_algorithms.testing.trainers import check_trainer, weights_digest

__all__ = [
    "ESTIMATOR_CHECKS",
    "LOSS_CHECKS",
    "ConformanceError",
    "LossBatch",
    "RewardBatch",
    "check_estimator",
    "check_loss",
    "check_trainer",
    "reward_batch",
    "token_batch",
    "weights_digest",
]

_MODULES = {
    "ESTIMATOR_CHECKS": "estimators",
    "LOSS_CHECKS": "losses",
    "ConformanceError": "examples",
    "LossBatch": "batches",
    "RewardBatch": "batches",
    "check_estimator": "estimators",
    "check_loss": "losses",
    "check_trainer": "trainers",
    "reward_batch": "batches",
    "token_batch": "batches",
    "weights_digest": "trainers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
