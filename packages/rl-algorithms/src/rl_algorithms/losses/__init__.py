"""Loss functions: pure functions of log-probabilities, masks and advantages.

Every reduction divides by the *global* count of valid tokens or sequences, so the
losses of micro-batches and of ranks add up to the loss of the whole batch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_algorithms.losses.clipped_pg import ClippedPGLossFn
    from rl_algorithms.losses.config import ClippedPGLossConfig
    from rl_algorithms.losses.distillation import DistillationLossFn
    from rl_algorithms.losses.distillation_config import DistillationLossConfig
    from rl_algorithms.losses.dpo import DPOLossFn
    from rl_algorithms.losses.dpo_config import DPOLossConfig
    from rl_algorithms.losses.kl import calculate_kl
    from rl_algorithms.losses.nll import NLLLossFn
    from rl_algorithms.losses.preference import PreferenceLossFn
    from rl_algorithms.losses.preference_config import PreferenceLossConfig
    from rl_algorithms.losses.reductions import masked_mean
    from rl_algorithms.losses.value import MseValueLossFn
    from rl_algorithms.losses.value_config import MseValueLossConfig

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossFn",
    "DistillationLossConfig",
    "DistillationLossFn",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossFn",
    "PreferenceLossConfig",
    "PreferenceLossFn",
    "calculate_kl",
    "masked_mean",
]

_MODULES = {
    "ClippedPGLossConfig": "config",
    "ClippedPGLossFn": "clipped_pg",
    "DPOLossConfig": "dpo_config",
    "DPOLossFn": "dpo",
    "DistillationLossConfig": "distillation_config",
    "DistillationLossFn": "distillation",
    "MseValueLossConfig": "value_config",
    "MseValueLossFn": "value",
    "NLLLossFn": "nll",
    "PreferenceLossConfig": "preference_config",
    "PreferenceLossFn": "preference",
    "calculate_kl": "kl",
    "masked_mean": "reductions",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
