"""GRPO and SFT trainers, losses, rollouts, and `train()` in five lines.

Names are imported on first use: `import rl_algorithms` loads neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_algorithms.advantages import (
        AdvantageConfig,
        GRPOAdvantageEstimator,
        RawRewardAdvantageEstimator,
        calculate_baseline_and_std_per_prompt,
    )
    from rl_algorithms.api import train
    from rl_algorithms.data import (
        BatchedDataLoader,
        DataConfig,
        DataModule,
        Mixture,
        load_dataset_any,
    )
    from rl_algorithms.distillation.config import (
        DistillationConfig,
        DistillationSettings,
    )
    from rl_algorithms.distillation.trainer import DistillationTrainer
    from rl_algorithms.dpo.config import DPOConfig, DPOSettings
    from rl_algorithms.dpo.trainer import DPOTrainer
    from rl_algorithms.errors import AlgorithmError, DataError
    from rl_algorithms.evaluation import EvalConfig, EvaluationResult, evaluate
    from rl_algorithms.grpo.config import GRPOConfig, GRPOSettings
    from rl_algorithms.grpo.trainer import GRPOTrainer
    from rl_algorithms.losses import (
        ClippedPGLossConfig,
        ClippedPGLossFn,
        DistillationLossConfig,
        DistillationLossFn,
        DPOLossConfig,
        DPOLossFn,
        MseValueLossConfig,
        MseValueLossFn,
        NLLLossFn,
        PreferenceLossConfig,
        PreferenceLossFn,
        calculate_kl,
        masked_mean,
    )
    from rl_algorithms.ppo.config import PPOConfig, PPOSettings
    from rl_algorithms.ppo.trainer import PPOTrainer
    from rl_algorithms.presets import Preset, preset_names, register_preset
    from rl_algorithms.registry import (
        algorithm_names,
        get_algorithm,
        get_config_class,
        register_algorithm,
    )
    from rl_algorithms.rm.config import RMConfig, RMSettings
    from rl_algorithms.rm.scoring import RewardModelFn
    from rl_algorithms.rm.trainer import RMTrainer
    from rl_algorithms.rollout import (
        Outcome,
        RetryConfig,
        RolloutConfig,
        RolloutEngine,
        RolloutResult,
        RolloutSettings,
    )
    from rl_algorithms.sft.config import SFTConfig, SFTSettings
    from rl_algorithms.sft.trainer import SFTTrainer
    from rl_algorithms.trainers.base import BaseTrainer
    from rl_algorithms.trainers.callbacks import Callback, LoggingCallback
    from rl_algorithms.trainers.run.history import History
    from rl_algorithms.trainers.run.result import TrainResult
    from rl_algorithms.trainers.run.signals import Interrupted
    from rl_algorithms.trainers.run.state import TrainerState
    from rl_algorithms.trainers.sampling.validation import ValidationResult
    from rl_algorithms.trainers.settings.config import EnvConfig, TrainerConfig
    from rl_algorithms.trainers.settings.config_updates import ConfigUpdate, update_run
    from rl_algorithms.trainers.settings.run_settings import RunSettings
    from rl_algorithms.trainers.setup.pool import WorkerPool

__all__ = [
    "AdvantageConfig",
    "AlgorithmError",
    "BaseTrainer",
    "BatchedDataLoader",
    "Callback",
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "ConfigUpdate",
    "DPOConfig",
    "DPOLossConfig",
    "DPOLossFn",
    "DPOSettings",
    "DPOTrainer",
    "DataConfig",
    "DataError",
    "DataModule",
    "DistillationConfig",
    "DistillationLossConfig",
    "DistillationLossFn",
    "DistillationSettings",
    "DistillationTrainer",
    "EnvConfig",
    "EvalConfig",
    "EvaluationResult",
    "GRPOAdvantageEstimator",
    "GRPOConfig",
    "GRPOSettings",
    "GRPOTrainer",
    "History",
    "Interrupted",
    "LoggingCallback",
    "Mixture",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossFn",
    "Outcome",
    "PPOConfig",
    "PPOSettings",
    "PPOTrainer",
    "PreferenceLossConfig",
    "PreferenceLossFn",
    "RMConfig",
    "RMSettings",
    "RMTrainer",
    "Preset",
    "RawRewardAdvantageEstimator",
    "RewardModelFn",
    "RetryConfig",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutResult",
    "RolloutSettings",
    "RunSettings",
    "SFTConfig",
    "SFTSettings",
    "SFTTrainer",
    "TrainResult",
    "TrainerConfig",
    "TrainerState",
    "ValidationResult",
    "WorkerPool",
    "__version__",
    "algorithm_names",
    "calculate_baseline_and_std_per_prompt",
    "calculate_kl",
    "evaluate",
    "get_algorithm",
    "get_config_class",
    "load_dataset_any",
    "masked_mean",
    "preset_names",
    "register_algorithm",
    "register_preset",
    "train",
    "update_run",
]

__version__ = version("rl-algorithms")

_NAMES_OF_MODULE = {
    "advantages": [
        "AdvantageConfig",
        "GRPOAdvantageEstimator",
        "RawRewardAdvantageEstimator",
        "calculate_baseline_and_std_per_prompt",
    ],
    "api": ["train"],
    "data": [
        "BatchedDataLoader",
        "DataConfig",
        "DataModule",
        "Mixture",
        "load_dataset_any",
    ],
    "distillation.config": ["DistillationConfig", "DistillationSettings"],
    "distillation.trainer": ["DistillationTrainer"],
    "dpo.config": ["DPOConfig", "DPOSettings"],
    "dpo.trainer": ["DPOTrainer"],
    "errors": ["AlgorithmError", "DataError"],
    "evaluation": ["EvalConfig", "EvaluationResult", "evaluate"],
    "grpo.config": ["GRPOConfig", "GRPOSettings"],
    "grpo.trainer": ["GRPOTrainer"],
    "losses": [
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
    ],
    "ppo.config": ["PPOConfig", "PPOSettings"],
    "ppo.trainer": ["PPOTrainer"],
    "registry": [
        "algorithm_names",
        "get_algorithm",
        "get_config_class",
        "register_algorithm",
    ],
    "rm.config": ["RMConfig", "RMSettings"],
    "rm.scoring": ["RewardModelFn"],
    "rm.trainer": ["RMTrainer"],
    "presets": ["Preset", "preset_names", "register_preset"],
    "rollout": [
        "Outcome",
        "RetryConfig",
        "RolloutConfig",
        "RolloutEngine",
        "RolloutResult",
        "RolloutSettings",
    ],
    "sft.config": ["SFTConfig", "SFTSettings"],
    "sft.trainer": ["SFTTrainer"],
    "trainers.base": ["BaseTrainer"],
    "trainers.callbacks": ["Callback", "LoggingCallback"],
    "trainers.settings.config": ["EnvConfig", "TrainerConfig"],
    "trainers.settings.config_updates": ["ConfigUpdate", "update_run"],
    "trainers.setup.pool": ["WorkerPool"],
    "trainers.run.history": ["History"],
    "trainers.run.result": ["TrainResult"],
    "trainers.settings.run_settings": ["RunSettings"],
    "trainers.run.signals": ["Interrupted"],
    "trainers.run.state": ["TrainerState"],
    "trainers.sampling.validation": ["ValidationResult"],
}
_MODULES = {
    name: module for module, names in _NAMES_OF_MODULE.items() for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
