"""Training and generation backends for language models, and weight sync between them.

Names are imported on first use: `import rl_models` loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_models.build.config import ModelBuildConfig, TokenizerBuildConfig
    from rl_models.build.model import build_model
    from rl_models.config import (
        DTensorConfig,
        DynamicBatchingConfig,
        OptimizerConfig,
        PolicyConfig,
        SchedulerConfig,
        SequencePackingConfig,
        TokenizerConfig,
    )
    from rl_models.errors import (
        ContextLengthError,
        GenerationError,
        ModelLoadError,
        ModelsError,
        NonFiniteGradientError,
        UnsupportedModelError,
        WeightSyncError,
    )
    from rl_models.generation.config import GenerationConfig
    from rl_models.generation.vllm.config import VllmConfig
    from rl_models.interfaces import (
        GenerationBackend,
        GenerationInterface,
        LossFunction,
        PolicyInterface,
        TrainingBackend,
    )
    from rl_models.ops.causal_lm import load_causal_lm
    from rl_models.policy.generation_policy import GenerationPolicy
    from rl_models.policy.huggingface_policy import HuggingFacePolicy
    from rl_models.policy.training_policy import TrainingPolicy
    from rl_models.policy.vllm_generation import VllmGeneration
    from rl_models.registry import (
        get_generation_backend,
        get_training_backend,
        register_generation_backend,
        register_training_backend,
    )
    from rl_models.types import (
        GenerationDatumSpec,
        GenerationOutputSpec,
        LogprobOutputSpec,
        LossInputType,
        LossType,
        ReferenceLogprobOutputSpec,
        SamplingParams,
        TrainDatumSpec,
        TrainOutput,
        ValueOutputSpec,
    )
    from rl_models.weights.config import ProbeConfig, WeightSyncConfig
    from rl_models.weights.sync import WeightSynchronizer

__all__ = [
    "ContextLengthError",
    "DTensorConfig",
    "DynamicBatchingConfig",
    "GenerationBackend",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationError",
    "GenerationInterface",
    "GenerationOutputSpec",
    "GenerationPolicy",
    "HuggingFacePolicy",
    "LogprobOutputSpec",
    "LossFunction",
    "LossInputType",
    "LossType",
    "ModelBuildConfig",
    "ModelLoadError",
    "ModelsError",
    "NonFiniteGradientError",
    "OptimizerConfig",
    "PolicyConfig",
    "PolicyInterface",
    "ProbeConfig",
    "ReferenceLogprobOutputSpec",
    "SamplingParams",
    "SchedulerConfig",
    "SequencePackingConfig",
    "TokenizerBuildConfig",
    "TokenizerConfig",
    "TrainDatumSpec",
    "TrainOutput",
    "TrainingBackend",
    "TrainingPolicy",
    "UnsupportedModelError",
    "ValueOutputSpec",
    "VllmConfig",
    "VllmGeneration",
    "WeightSyncConfig",
    "WeightSyncError",
    "WeightSynchronizer",
    "__version__",
    "build_model",
    "get_generation_backend",
    "get_training_backend",
    "load_causal_lm",
    "register_generation_backend",
    "register_training_backend",
]

__version__ = version("rl-models")

_MODULE_OF_NAMES = {
    "config": [
        "DTensorConfig",
        "DynamicBatchingConfig",
        "OptimizerConfig",
        "PolicyConfig",
        "SchedulerConfig",
        "SequencePackingConfig",
        "TokenizerConfig",
    ],
    "errors": [
        "ContextLengthError",
        "GenerationError",
        "ModelLoadError",
        "ModelsError",
        "NonFiniteGradientError",
        "UnsupportedModelError",
        "WeightSyncError",
    ],
    "generation.config": ["GenerationConfig"],
    "generation.vllm.config": ["VllmConfig"],
    "interfaces": [
        "GenerationBackend",
        "GenerationInterface",
        "LossFunction",
        "PolicyInterface",
        "TrainingBackend",
    ],
    "build.config": ["ModelBuildConfig", "TokenizerBuildConfig"],
    "build.model": ["build_model"],
    "ops.causal_lm": ["load_causal_lm"],
    "policy.generation_policy": ["GenerationPolicy"],
    "policy.huggingface_policy": ["HuggingFacePolicy"],
    "policy.training_policy": ["TrainingPolicy"],
    "policy.vllm_generation": ["VllmGeneration"],
    "registry": [
        "get_generation_backend",
        "get_training_backend",
        "register_generation_backend",
        "register_training_backend",
    ],
    "types": [
        "GenerationDatumSpec",
        "GenerationOutputSpec",
        "LogprobOutputSpec",
        "LossInputType",
        "LossType",
        "ReferenceLogprobOutputSpec",
        "SamplingParams",
        "TrainDatumSpec",
        "TrainOutput",
        "ValueOutputSpec",
    ],
    "weights.config": ["ProbeConfig", "WeightSyncConfig"],
    "weights.sync": ["WeightSynchronizer"],
}
_MODULES = {
    name: module for module, names in _MODULE_OF_NAMES.items() for name in names
}


def __getattr__(name: str) -> Any:
    """Imports the module of a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'rl_models' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rl_models.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
