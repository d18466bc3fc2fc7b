"""Exceptions of rl-models.

```
DistributedError                       (rl_distributed)
├── UserError                          (rl_distributed) input the caller can mend
│   ├── ModelLoadError      OSError      a model folder or name that cannot be read
│   ├── UnsupportedModelError  TypeError   a model that cannot do what was asked
│   └── BatchError                     (rl_distributed)
│       └── ContextLengthError  ValueError  a sequence longer than the context
└── ModelsError             RuntimeError
    ├── NonFiniteGradientError  ArithmeticError   gradients stay inf or nan
    ├── GenerationError                 a generation backend failed
    └── WeightSyncError                 a replica did not confirm its weights
```

Configuration errors are `rl_distributed.errors.ConfigError`, damaged checkpoints are
`rl_distributed.errors.CheckpointError`. All can be pickled: they cross processes.
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


class ModelLoadError(UserError, OSError):
    """A model folder or hub name cannot be read; the message says what is missing."""


class UnsupportedModelError(UserError, TypeError):
    """The model's architecture cannot do what the configuration asks for."""


class ContextLengthError(BatchError):
    """A sequence is longer than the model or the configuration allows."""


class ModelsError(DistributedError, RuntimeError):
    """Root of the failures of training and generation backends."""


class NonFiniteGradientError(ModelsError, ArithmeticError):
    """Too many optimizer steps in a row had a gradient that is inf or nan."""


class GenerationError(ModelsError):
    """A generation backend failed."""


class WeightSyncError(ModelsError):
    """A replica did not confirm the weights that it was given."""
