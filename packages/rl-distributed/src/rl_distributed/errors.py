"""Exceptions of rl-distributed.

```
DistributedError                      root of every error that the framework raises
├── UserError                         input the caller can mend (exit code 2 in the CLI)
│   ├── ConfigError        ValueError   a key, type, range or combination
│   ├── RegistryError      LookupError  an unknown name, or its package is missing
│   │   └── MissingExtraError  ImportError  an extra of rl-distributed is missing
│   ├── ShardingError      ValueError   axes, ranks or layouts
│   ├── BatchError         ValueError   columns, lengths or batch sizes
│   │   └── PackingError   ValueError   a row that fits in no micro-batch
│   ├── SecurityError      PermissionError  a token or a certificate is refused
│   ├── ActorEnvironmentError  RuntimeError   an actor's Python cannot be had
│   └── ResourceInsufficientError  RuntimeError   more than the cluster has
├── WorkerError            RuntimeError
│   ├── WorkerStartError                a worker did not come up
│   ├── WorkerMethodError               a method raised in a worker
│   ├── WorkerDiedError                 the process of a worker is gone
│   ├── WorkerHungError    TimeoutError   a worker gives no sign of life
│   └── CallCancelledError              the call was cancelled by its caller
├── ClusterLostError       ConnectionError   a process of Ray itself has ended
├── DeadlineExceededError  TimeoutError   a wait came to its end
│   └── LockHeldError                   another process holds a lock
├── QueueClosedError       EOFError       all producers have closed, all items are taken
├── TransferError          OSError        tensors did not arrive as they were sent
├── AuditError             OSError        the audit log is damaged or cannot be written
└── CheckpointError        OSError        a checkpoint is damaged or cannot be written
```

Each also inherits the builtin that it replaces, and all can be pickled, because they
cross processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_distributed.failures.cluster_loss import ClusterLoss
    from rl_distributed.failures.lock_owner import LockOwner
    from rl_distributed.failures.worker import WorkerFailure

__all__ = [
    "ActorEnvironmentError",
    "AuditError",
    "BatchError",
    "CallCancelledError",
    "CheckpointError",
    "ClusterLostError",
    "ConfigError",
    "DeadlineExceededError",
    "DistributedError",
    "LockHeldError",
    "MissingExtraError",
    "PackingError",
    "QueueClosedError",
    "RegistryError",
    "ResourceInsufficientError",
    "SecurityError",
    "ShardingError",
    "TransferError",
    "UserError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerHungError",
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


class MissingExtraError(RegistryError, ImportError):
    """What is asked for needs a package that an extra of rl-distributed installs."""


class ShardingError(UserError, ValueError):
    """Axes, ranks or layouts of a sharding do not fit."""


class BatchError(UserError, ValueError):
    """Columns, lengths or sizes of a batch do not fit."""


class PackingError(BatchError):
    """A row fits in no micro-batch, or rows do not suffice for the bins asked for."""


class ActorEnvironmentError(UserError, RuntimeError):
    """The Python environment of an actor cannot be built, or does not fit."""


class ResourceInsufficientError(UserError, RuntimeError):
    """More was asked for than the cluster has."""


class SecurityError(UserError, PermissionError):
    """A token, a certificate or the lack of one keeps a cluster from answering."""


class AuditError(DistributedError, OSError):
    """An audit log is damaged, or cannot be written."""

    line: int | None = None
    """The first damaged line, from 1 on, where there is one."""
    reason: str | None = None
    """What is wrong with it, or with the end of the log; None: it was not read."""


class WorkerError(DistributedError, RuntimeError):
    """A worker of a group failed.

    Where a method or constructor raised, `__cause__` is its exception, if that can be
    pickled.
    """

    failure: WorkerFailure | None = None
    """Rank, node, method and cause for programs to read, where they are known."""

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        """Put back what Python does not pickle of an exception: its cause."""
        super().__setstate__(state)
        if self.failure is not None:
            self.__cause__ = self.failure.raised()


class WorkerStartError(WorkerError):
    """A worker did not come up within its deadline, or its constructor raised."""


class WorkerMethodError(WorkerError):
    """A method raised in a worker; the message holds the worker's own traceback."""


class WorkerDiedError(WorkerError):
    """The process of a worker is gone."""


class WorkerHungError(WorkerError, TimeoutError):
    """A worker gave no sign of life, or did not end a call within its deadline."""


class CallCancelledError(WorkerError):
    """The results of a call were asked for after the call was cancelled."""


class ClusterLostError(DistributedError, ConnectionError):
    """A process of Ray without which no program can go on has ended."""

    loss: ClusterLoss | None = None
    """Which process, and how it ended."""


class DeadlineExceededError(DistributedError, TimeoutError):
    """A wait came to its end; the message names who was waited for."""


class LockHeldError(DeadlineExceededError):
    """Another process holds a lock; the message names it."""

    owner: LockOwner | None = None
    """Process, machine and since when, for programs to read, where they are known."""


class QueueClosedError(DistributedError, EOFError):
    """All producers have closed a queue, and all its items are taken."""


class TransferError(DistributedError, OSError):
    """Tensors did not arrive as they were sent; the message names them."""


class CheckpointError(DistributedError, OSError):
    """A checkpoint is damaged, incomplete or cannot be written."""
