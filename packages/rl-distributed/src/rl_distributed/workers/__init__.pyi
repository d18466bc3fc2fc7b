from .builder import RayWorkerBuilder as RayWorkerBuilder
from .cancellation import (
    is_cancelled as is_cancelled,
    stop_if_cancelled as stop_if_cancelled,
)
from .future import MultiWorkerFuture as MultiWorkerFuture
from .group import RayWorkerGroup as RayWorkerGroup
from .options import (
    WorkerOptions as WorkerOptions,
    recursive_merge_options as recursive_merge_options,
)
from .policy import (
    FailFast as FailFast,
    FailurePolicy as FailurePolicy,
    RestartGroup as RestartGroup,
    RestartWorker as RestartWorker,
)
from .pool import (
    Retry as Retry,
    TaskResult as TaskResult,
    WorkerPool as WorkerPool,
)
from .typed_calls import CallFuture as CallFuture
from .wait import (
    WorkerOutcome as WorkerOutcome,
    WorkerResult as WorkerResult,
)
