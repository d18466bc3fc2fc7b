from .worker import (
    WorkerFailure as WorkerFailure,
    WorkerHealth as WorkerHealth,
)
