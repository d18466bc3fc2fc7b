"""Exceptions of rl-algorithms.

```
AlgorithmError              a DistributedError; root of them all
├── DataError               UserError, ValueError  a dataset, a row or a column
│   ├── DatasetNotFoundError  FileNotFoundError    no such file, folder or hub name
│   ├── ColumnError           LookupError          a column is missing or mistyped
│   ├── EmptyDatasetError                          nothing (left) to train on
│   ├── PromptTooLongError                         more tokens than the context has
│   └── ContaminationError                         held-out rows are trained on
├── LossInputError          UserError, ValueError  a column that a loss needs is missing
├── RolloutError            RuntimeError           too many rows of a rollout failed
├── NoLearningSignalError   RuntimeError           no group of answers differs in reward
├── MismatchError           RuntimeError           sampler and trainer disagree
├── ScheduleError           RuntimeError           an impossible event or state
├── StalledError            RuntimeError, TimeoutError  a run made no progress
└── ConformanceError        AssertionError         a rule is violated (testing)
```

`UserError` marks input that the caller can fix (exit code 2 in the CLI).
Each also inherits the builtin that it replaces, and all can be pickled, because they
cross processes.
"""

from __future__ import annotations

from rl_distributed.errors import DistributedError, UserError

__all__ = [
    "AlgorithmError",
    "ColumnError",
    "ContaminationError",
    "DataError",
    "DatasetNotFoundError",
    "EmptyDatasetError",
    "LossInputError",
    "MismatchError",
    "NoLearningSignalError",
    "PromptTooLongError",
    "RolloutError",
    "ScheduleError",
    "StalledError",
]


class AlgorithmError(DistributedError):
    """Root of the errors of algorithms; raised itself where training cannot go on."""


class DataError(AlgorithmError, UserError, ValueError):
    """A dataset, one of its rows or one of its columns is wrong."""


class DatasetNotFoundError(DataError, FileNotFoundError):
    """No file, folder or hub dataset of that name can be read."""


class ColumnError(DataError, LookupError):
    """A column is missing, or its values have the wrong type."""


class EmptyDatasetError(DataError):
    """A dataset has no rows, or none are left after overlong ones were dropped."""


class PromptTooLongError(DataError):
    """A prompt has more tokens than the context can hold."""


class ContaminationError(DataError):
    """Evaluation rows are among the training rows."""


class LossInputError(AlgorithmError, UserError, ValueError):
    """A batch lacks a column that the configured loss needs, or shapes differ."""


class RolloutError(AlgorithmError, RuntimeError):
    """A rollout produced too few rows that can be trained on."""


class NoLearningSignalError(AlgorithmError, RuntimeError):
    """All answers of every group earn the same reward, so nothing can be learned."""


class MismatchError(AlgorithmError, RuntimeError):
    """The log-probs of sampler and trainer differ by more than `mismatch.limit`."""


class ScheduleError(AlgorithmError, RuntimeError):
    """The schedule of asynchronous training got an impossible event or state."""


class StalledError(AlgorithmError, RuntimeError, TimeoutError):
    """A run made no progress for `fault_tolerance.stall_limit_s`."""
