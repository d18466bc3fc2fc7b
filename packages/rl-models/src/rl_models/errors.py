"""Exceptions of rl-models.

```
ModelsError                 a DistributedError; root of them all
├── ModelLoadError          UserError, OSError    a model that cannot be read
├── UnsupportedModelError   UserError, TypeError  a model that cannot do what was asked
├── ContextLengthError      BatchError            a sequence longer than the context
├── NonFiniteGradientError  RuntimeError, ArithmeticError  gradients stay inf or nan
├── GenerationError         RuntimeError          a generation backend failed
├── WeightSyncError         RuntimeError          a replica did not confirm its weights
└── ContractError           AssertionError        a backend breaks a protocol (testing)
```

`UserError` marks input that the caller can fix (exit code 2 in the CLI), and so does
`BatchError`. Configuration errors are `rl_distributed.errors.ConfigError`, damaged
checkpoints are `rl_distributed.errors.CheckpointError`. All can be pickled, because
they cross processes.
"""

from __future__ import annotations

from rl_distributed.errors import BatchError, DistributedError, UserError

__all__ = [
    "ContextLengthError",
    "GenerationError",
    "ModelLoadError",
    "ModelsError",
    "NonFiniteGradientError",
    "UnsupportedModelError",
    "WeightSyncError",
]


class ModelsError(DistributedError):
    """Root of the errors of models, and of training and generation backends."""


class ModelLoadError(ModelsError, UserError, OSError):
    """A model folder or hub name cannot be read; the message says what is missing."""


class UnsupportedModelError(ModelsError, UserError, TypeError):
    """The model's architecture cannot do what the configuration asks for."""


class ContextLengthError(ModelsError, BatchError):
    """A sequence is longer than the model or the configuration allows."""


class NonFiniteGradientError(ModelsError, RuntimeError, ArithmeticError):
    """Too many optimizer steps in a row had a gradient that is inf or nan."""


class GenerationError(ModelsError, RuntimeError):
    """A generation backend failed."""


class WeightSyncError(ModelsError, RuntimeError):
    """A replica did not confirm the weights that it was given."""
