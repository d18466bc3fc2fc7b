"""Exceptions of rl-distributed.

```
DistributedError                      root of every error that the framework raises
├── UserError                         input the caller can mend (exit code 2 in the CLI)
│   ├── ConfigError        ValueError   a key, type, range or combination
│   ├── RegistryError      LookupError  an unknown name, or its package is missing
│   ├── ShardingError      ValueError   axes, ranks or layouts
│   ├── BatchError         ValueError   columns, lengths or batch sizes
│   │   └── PackingError   ValueError   a row that fits in no micro-batch
│   └── ResourceInsufficientError  RuntimeError   more than the cluster has
├── WorkerError            RuntimeError
│   ├── WorkerStartError                a worker did not come up
│   ├── WorkerMethodError               a method raised in a worker
│   └── WorkerDiedError                 the process of a worker is gone
├── DeadlineExceededError  TimeoutError   a wait came to its end
└── CheckpointError        OSError        a checkpoint is damaged or cannot be written
```

Each also inherits the builtin that it replaces, and all can be pickled, because they
cross processes.
"""

from __future__ import annotations

__all__ = [
    "BatchError",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceededError",
    "DistributedError",
    "PackingError",
    "RegistryError",
    "ResourceInsufficientError",
    "ShardingError",
    "UserError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerMethodError",
    "WorkerStartError",
]


class DistributedError(Exception):
    """Root of every error that the framework raises."""


class UserError(DistributedError):
    """Input that the caller can mend; the message names the thing and the remedy."""


class ConfigError(UserError, ValueError):
    """A configuration key, type, range or combination is wrong."""


class RegistryError(UserError, LookupError):
    """A name is not registered, or the package that provides it is not installed."""


class ShardingError(UserError, ValueError):
    """Axes, ranks or layouts of a sharding do not fit."""


class BatchError(UserError, ValueError):
    """Columns, lengths or sizes of a batch do not fit."""


class PackingError(BatchError):
    """A row fits in no micro-batch, or rows do not suffice for the bins asked for."""


class ResourceInsufficientError(UserError, RuntimeError):
    """More was asked for than the cluster has."""


class WorkerError(DistributedError, RuntimeError):
    """A worker of a group failed."""


class WorkerStartError(WorkerError):
    """A worker did not come up within its deadline, or its constructor raised."""


class WorkerMethodError(WorkerError):
    """A method raised in a worker; the message holds the worker's own traceback."""


class WorkerDiedError(WorkerError):
    """The process of a worker is gone."""


class DeadlineExceededError(DistributedError, TimeoutError):
    """A wait came to its end; the message names who was waited for."""


class CheckpointError(DistributedError, OSError):
    """A checkpoint is damaged, incomplete or cannot be written."""
