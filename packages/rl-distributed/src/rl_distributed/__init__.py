"""Virtual clusters, worker groups, named sharding and batched data on Ray.

Every public name is imported when it is first used, so that `import rl_distributed`
costs nothing, and neither Ray nor torch is loaded before it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_distributed.errors import (
    ActorEnvironmentError,
    AuditError,
    BatchError,
    CallCancelledError,
    CheckpointError,
    ClusterLostError,
    ConfigError,
    DeadlineExceededError,
    DistributedError,
    LockHeldError,
    MissingExtraError,
    PackingError,
    QueueClosedError,
    RegistryError,
    ResourceInsufficientError,
    SecurityError,
    ShardingError,
    TransferError,
    UserError,
    WorkerDiedError,
    WorkerError,
    WorkerHungError,
    WorkerMethodError,
    WorkerStartError,
)

if TYPE_CHECKING:
    from rl_distributed.actor_environments import (
        ActorEnvironment,
        ContainerEnvironment,
        DriverEnvironment,
        EnvironmentStore,
        ExtraEnvironment,
        InstalledEnvironment,
        InterpreterEnvironment,
        OverlayEnvironment,
        UvWorkspaceEnvironment,
    )
    from rl_distributed.batch.batched_data_dict import (
        BatchedDataDict,
        DynamicBatchingArgs,
        SequencePackingArgs,
        SlicedDataDict,
    )
    from rl_distributed.batch.packing import (
        PackingAlgorithm,
        SequencePacker,
        get_packer,
    )
    from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
    from rl_distributed.cluster.config import ClusterConfig
    from rl_distributed.cluster.resources import ResourceManager
    from rl_distributed.cluster.start import init_ray, shutdown_ray, wait_for_nodes
    from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
    from rl_distributed.config import (
        Config,
        ConfigDocument,
        ConfigRow,
        Override,
        apply_overrides,
        explain_config,
        load_config,
        merge_configs,
        parse_overrides,
    )
    from rl_distributed.file_lock import FileLock, FolderLock
    from rl_distributed.launch import (
        KubeRayConfig,
        SlurmConfig,
        kuberay_manifest,
        slurm_script,
    )
    from rl_distributed.logs.logging import configure_logging, get_logger, log_context
    from rl_distributed.metrics import (
        Distribution,
        Histogram,
        Last,
        LoggerConfig,
        LoggerFacade,
        Max,
        Mean,
        Min,
        ResourceSampler,
        Sum,
        reduce_metrics,
    )
    from rl_distributed.named_sharding import NamedSharding
    from rl_distributed.queues.queue import BoundedQueue
    from rl_distributed.registry import Registry
    from rl_distributed.security.access import make_certificates
    from rl_distributed.security.audit import (
        enable_audit,
        make_audit_key,
        verify_audit_log,
    )
    from rl_distributed.security.tls_files import TlsFiles
    from rl_distributed.timing.timer import TimeoutChecker, Timer
    from rl_distributed.timing.tracing import Span, export_chrome_trace
    from rl_distributed.transfer import (
        CollectiveLink,
        CudaIpcLink,
        FileLink,
        Manifest,
        ObjectStoreLink,
        SharedMemoryLink,
        TensorStream,
        receive_tensors,
        send_tensors,
    )
    from rl_distributed.workers import (
        FailFast,
        MultiWorkerFuture,
        RayWorkerBuilder,
        RayWorkerGroup,
        RestartGroup,
        RestartWorker,
        WorkerFailure,
        WorkerHealth,
        WorkerResult,
        is_cancelled,
        recursive_merge_options,
        stop_if_cancelled,
    )

    __version__: str

__all__ = [
    # cluster and workers
    "ClusterConfig",
    "MultiWorkerFuture",
    "FailFast",
    "RayVirtualCluster",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "ResourceManager",
    "RestartGroup",
    "RestartWorker",
    "WorkerFailure",
    "WorkerHealth",
    "WorkerResult",
    "init_ray",
    "is_cancelled",
    "recursive_merge_options",
    "stop_if_cancelled",
    "shutdown_ray",
    "wait_for_nodes",
    # launch files, security, audit
    "KubeRayConfig",
    "SlurmConfig",
    "TlsFiles",
    "enable_audit",
    "kuberay_manifest",
    "make_audit_key",
    "make_certificates",
    "slurm_script",
    "verify_audit_log",
    # which Python environment a class runs in
    "ActorEnvironment",
    "ContainerEnvironment",
    "DriverEnvironment",
    "EnvironmentStore",
    "ExtraEnvironment",
    "InstalledEnvironment",
    "InterpreterEnvironment",
    "OverlayEnvironment",
    "UvWorkspaceEnvironment",
    # data and sharding
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "NamedSharding",
    "PackingAlgorithm",
    "SequencePacker",
    "SequencePackingArgs",
    "SlicedDataDict",
    "get_packer",
    # channels between workers
    "BoundedQueue",
    "CollectiveLink",
    "CudaIpcLink",
    "FileLink",
    "Manifest",
    "ObjectStoreLink",
    "SharedMemoryLink",
    "TensorStream",
    "receive_tensors",
    "send_tensors",
    # configuration and registries
    "Config",
    "ConfigDocument",
    "ConfigRow",
    "Override",
    "Registry",
    "apply_overrides",
    "explain_config",
    "load_config",
    "merge_configs",
    "parse_overrides",
    # locks, checkpoints, metrics, time, logs
    "CheckpointManager",
    "CheckpointingConfig",
    "Distribution",
    "FileLock",
    "FolderLock",
    "Histogram",
    "Last",
    "LoggerConfig",
    "LoggerFacade",
    "Max",
    "Mean",
    "Min",
    "ResourceSampler",
    "Span",
    "Sum",
    "TimeoutChecker",
    "Timer",
    "configure_logging",
    "export_chrome_trace",
    "get_logger",
    "log_context",
    "reduce_metrics",
    # errors
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
    "__version__",
]

_MODULES = {
    "actor_environments": (
        "ActorEnvironment",
        "ContainerEnvironment",
        "DriverEnvironment",
        "EnvironmentStore",
        "ExtraEnvironment",
        "InstalledEnvironment",
        "InterpreterEnvironment",
        "OverlayEnvironment",
        "UvWorkspaceEnvironment",
    ),
    "security.audit": ("enable_audit", "make_audit_key", "verify_audit_log"),
    "batch.batched_data_dict": (
        "BatchedDataDict",
        "DynamicBatchingArgs",
        "SequencePackingArgs",
        "SlicedDataDict",
    ),
    "checkpoint": ("CheckpointManager", "CheckpointingConfig"),
    "cluster.config": ("ClusterConfig",),
    "config": (
        "Config",
        "ConfigDocument",
        "ConfigRow",
        "Override",
        "apply_overrides",
        "explain_config",
        "load_config",
        "merge_configs",
        "parse_overrides",
    ),
    "file_lock": ("FileLock", "FolderLock"),
    "launch": ("KubeRayConfig", "SlurmConfig", "kuberay_manifest", "slurm_script"),
    "logs.logging": ("configure_logging", "get_logger", "log_context"),
    "metrics": (
        "Distribution",
        "Histogram",
        "Last",
        "LoggerConfig",
        "LoggerFacade",
        "Max",
        "Mean",
        "Min",
        "ResourceSampler",
        "Sum",
        "reduce_metrics",
    ),
    "named_sharding": ("NamedSharding",),
    "batch.packing": ("PackingAlgorithm", "SequencePacker", "get_packer"),
    "queues.queue": ("BoundedQueue",),
    "cluster.start": ("init_ray", "shutdown_ray", "wait_for_nodes"),
    "registry": ("Registry",),
    "cluster.resources": ("ResourceManager",),
    "security.access": ("make_certificates",),
    "security.tls_files": ("TlsFiles",),
    "timing.timer": ("TimeoutChecker", "Timer"),
    "timing.tracing": ("Span", "export_chrome_trace"),
    "transfer": (
        "CollectiveLink",
        "CudaIpcLink",
        "FileLink",
        "Manifest",
        "ObjectStoreLink",
        "SharedMemoryLink",
        "TensorStream",
        "receive_tensors",
        "send_tensors",
    ),
    "cluster.virtual_cluster": ("RayVirtualCluster",),
    "workers": (
        "FailFast",
        "MultiWorkerFuture",
        "RayWorkerBuilder",
        "RayWorkerGroup",
        "RestartGroup",
        "RestartWorker",
        "WorkerFailure",
        "WorkerHealth",
        "WorkerResult",
        "is_cancelled",
        "recursive_merge_options",
        "stop_if_cancelled",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version(
            "rl-distributed"
        )
    elif name in _MODULE_OF:
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        value = getattr(module, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
