"""Virtual clusters, worker groups, named sharding and batched data on Ray.

Every public name is imported when it is first used, so that `import rl_distributed`
costs nothing, and neither Ray nor torch is loaded before it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_distributed.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    DeadlineExceededError,
    DistributedError,
    PackingError,
    RegistryError,
    ResourceInsufficientError,
    ShardingError,
    UserError,
    WorkerDiedError,
    WorkerError,
    WorkerMethodError,
    WorkerStartError,
)

if TYPE_CHECKING:
    from rl_distributed.batched_data_dict import (
        BatchedDataDict,
        DynamicBatchingArgs,
        SequencePackingArgs,
        SlicedDataDict,
    )
    from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
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
    from rl_distributed.logging import configure_logging, get_logger, log_context
    from rl_distributed.metrics import (
        Last,
        LoggerConfig,
        LoggerFacade,
        Max,
        Mean,
        Min,
        Sum,
        reduce_metrics,
    )
    from rl_distributed.named_sharding import NamedSharding
    from rl_distributed.packing import PackingAlgorithm, SequencePacker, get_packer
    from rl_distributed.registry import Registry
    from rl_distributed.resources import ResourceManager
    from rl_distributed.timing import TimeoutChecker, Timer
    from rl_distributed.virtual_cluster import (
        ClusterConfig,
        RayVirtualCluster,
        init_ray,
    )
    from rl_distributed.workers import (
        MultiWorkerFuture,
        RayWorkerBuilder,
        RayWorkerGroup,
        recursive_merge_options,
    )

    __version__: str

__all__ = [
    # cluster and workers
    "ClusterConfig",
    "MultiWorkerFuture",
    "RayVirtualCluster",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "ResourceManager",
    "init_ray",
    "recursive_merge_options",
    # data and sharding
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "NamedSharding",
    "PackingAlgorithm",
    "SequencePacker",
    "SequencePackingArgs",
    "SlicedDataDict",
    "get_packer",
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
    # checkpoints, metrics, time, logs
    "CheckpointManager",
    "CheckpointingConfig",
    "Last",
    "LoggerConfig",
    "LoggerFacade",
    "Max",
    "Mean",
    "Min",
    "Sum",
    "TimeoutChecker",
    "Timer",
    "configure_logging",
    "get_logger",
    "log_context",
    "reduce_metrics",
    # errors
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
    "__version__",
]

_MODULES = {
    "batched_data_dict": (
        "BatchedDataDict",
        "DynamicBatchingArgs",
        "SequencePackingArgs",
        "SlicedDataDict",
    ),
    "checkpoint": ("CheckpointManager", "CheckpointingConfig"),
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
    "logging": ("configure_logging", "get_logger", "log_context"),
    "metrics": (
        "Last",
        "LoggerConfig",
        "LoggerFacade",
        "Max",
        "Mean",
        "Min",
        "Sum",
        "reduce_metrics",
    ),
    "named_sharding": ("NamedSharding",),
    "packing": ("PackingAlgorithm", "SequencePacker", "get_packer"),
    "registry": ("Registry",),
    "resources": ("ResourceManager",),
    "timing": ("TimeoutChecker", "Timer"),
    "virtual_cluster": ("ClusterConfig", "RayVirtualCluster", "init_ray"),
    "workers": (
        "MultiWorkerFuture",
        "RayWorkerBuilder",
        "RayWorkerGroup",
        "recursive_merge_options",
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
